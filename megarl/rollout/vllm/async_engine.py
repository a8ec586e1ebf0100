"""One vLLM replica of the split topology, in separate processes: an AsyncLLM and its workers' sync.

    submit --requests--> AsyncLLM --> cores and workers --finished samples--> poll
    join, transfer, end --collective_rpc--> WorkerExtension, on every worker: publish's receiver

There is one core for each data rank. Of a replica that spans nodes, AsyncLLM runs on the first
node, with that node's cores and workers; `serve_part` starts those of another node.

The workers and the trainer's ranks share a process group beside Megatron's and vLLM's: trainers
first. A version is served only after `end` commits it; until then, and after a failed sync,
requests are refused.
"""

import asyncio
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.config.launch import fleet_of
from megarl.config.schema import Config
from megarl.models.registry import read_model
from megarl.platform.device import DTYPES
from megarl.platform.env import get_env, set_env
from megarl.processes.children import Children
from megarl.rollout.exchange import deal, pack
from megarl.rollout.vllm import arguments
from megarl.types import CheckFailed, Request, Sample, SampleKey
from megarl.weights.sync.from_config import engine_weights, make_publisher
from megarl.weights.sync.transports.collective import Collective, join_group, open_store

CHECK_S = 10.0
SILENT = 0.9  # share of the time-out, as for a rank (processes.heartbeat)
Reply = dict[str, Any]  # a worker's: {"error": text}, or values
EXTENSION = "megarl.rollout.vllm.worker.WorkerExtension"


@dataclass(frozen=True)
class Part:
    """One node's part of a replica; plain values, to cross processes."""

    number: int = 0
    parts: int = 1
    host: str = ""  # address of the first part's node
    ports: tuple[int, int] = (0, 0)  # of torch.distributed and of vLLM's cores, on that node

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of vLLM's EngineArgs."""
        if self.parts == 1:
            return {}
        port, rpc_port = self.ports
        return {
            "nnodes": self.parts,
            "node_rank": self.number,
            "master_addr": self.host,
            "master_port": port,
            "data_parallel_rpc_port": rpc_port,
        }


@dataclass(frozen=True)
class SyncGroup:
    """Where trainer ranks and engine workers meet for syncs; plain values, to cross processes."""

    store: str  # address (transports.collective.open_store)
    name: str  # a new name each time they join
    config: str  # the run's, as JSON
    ranks_per_node: int

    def join(
        self, rank: int, replica: int | None = None, *, is_cuda: bool
    ) -> tuple[Config, Any, Collective]:
        """Returns config, fleet and transport. A collective.

        `rank`: within an engine's `replica`, or the trainer's.
        """
        config = Config.model_validate_json(self.config)
        fleet = fleet_of(config, ranks_per_node=self.ranks_per_node)
        timeout = timedelta(seconds=config.launch.timeout_s)
        if replica is not None:
            rank += fleet.first_receiver + replica * fleet.ranks_per_replica
        group = join_group(
            open_store(self.store, self.name, timeout),
            rank,
            fleet.world,
            name=self.name,
            is_cuda=is_cuda,
            timeout=timeout,
        )
        return config, fleet, group


class WorkerExtension:
    """Mixed into vLLM's worker; methods return {"error": text}, as an exception ends the engine."""

    rank: int  # within the data rank
    parallel_config: Any
    sync_publisher: Any = None

    def sync_join(self, group: Mapping[str, Any], replica: int, folder: str) -> Reply:
        return _reported(self._sync_join, SyncGroup(**group), replica, Path(folder))

    def _sync_join(self, group: SyncGroup, replica: int, folder: Path) -> Reply:
        from megarl.rollout.vllm.weight_loader import LayerReceiver

        if self.sync_publisher:
            self.sync_publisher.transport.leave()
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        is_cuda = next(model.parameters()).is_cuda
        shape = read_model(folder)
        sizes = self.parallel_config
        rank = sizes.data_parallel_rank * sizes.tensor_parallel_size + self.rank
        config, fleet, transport = group.join(rank, replica, is_cuda=is_cuda)
        weights = engine_weights(config, shape)
        if self.sync_publisher:
            receiver = self.sync_publisher.receiver
        else:
            receiver = LayerReceiver(model, weights, lambda: None)  # the core drops its cache
        self.sync_publisher = make_publisher(
            config, shape, fleet, transport, None, receiver, is_cuda=is_cuda, weights=weights
        )
        return {}

    def sync_transfer(self, version: int) -> Reply:
        return _reported(lambda: {"prove": self.sync_publisher.transfer(version)})

    def sync_end(self, version: int, committed: bool) -> Reply:
        if committed:
            self.sync_publisher.commit(version)
        else:
            self.sync_publisher.abort()
        return {}


def _reported(call: Any, *values: Any) -> Reply:
    try:
        return call(*values)
    except CheckFailed as refusal:
        return {"error": str(refusal)}
    except Exception as error:  # noqa: BLE001 (raised by the controller)
        return {"error": f"{type(error).__name__}: {error}"}


@dataclass
class AsyncEngine:
    """A replica, in the process that talks to its core. All methods run in one event loop."""

    llm: Any
    config: Config
    folder: Path
    children: Children
    stop_token_ids: Sequence[int]
    replica: int
    is_ready: bool = False  # a version is committed
    # the task that waits for each running request; its name is vLLM's id
    _tasks: dict[SampleKey, asyncio.Task[Sample]] = field(default_factory=dict)
    _finished: list[Sample] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _error: str = ""
    _serial: int = 0
    _checks: Any = None  # the task of _check_core

    @classmethod
    async def start(
        cls,
        config: Config,
        folder: Path,
        stop_token_ids: Sequence[int],
        replica: int,
        part: Part = Part(),
    ) -> "AsyncEngine":
        """Starts vLLM with dummy weights; waits for the replica's other parts."""
        engine_args = _engine_args(config, folder, part)
        from vllm.v1.engine.async_llm import AsyncLLM

        # in a thread, so that the caller notices if another part fails
        llm = await asyncio.to_thread(AsyncLLM.from_engine_args, engine_args)
        children = Children.of_this_process()
        engine = cls(llm, config, folder, children, stop_token_ids, replica)
        children.watch(asyncio.get_running_loop(), engine.lose)
        engine._checks = asyncio.ensure_future(engine._check_core())
        return engine

    @property
    def max_model_len(self) -> int:
        return self.llm.model_config.max_model_len

    async def call(self, method: str, *values: Any) -> Any:
        """Calls any method below.

        Raises RuntimeError once the engine is lost: vLLM may wait for a core that is gone.
        """
        if self.children.lost.is_set():
            raise RuntimeError(self._error)
        value = getattr(self, method)(*values)
        if not inspect.isawaitable(value):
            return value
        call = asyncio.ensure_future(value)
        lost = asyncio.ensure_future(self.children.lost.wait())
        await asyncio.wait({call, lost}, return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if self.children.lost.is_set():
            call.cancel()
            raise RuntimeError(self._error)
        return call.result()

    # sampling

    def submit(self, requests: Sequence[Request]) -> None:
        """Starts these; `poll` returns each once. `deal` gives each prompt to one data rank."""
        if not self.is_ready:
            raise CheckFailed(f"engine {self.replica} has no verified weights; publish them first")
        for data_rank, share in enumerate(deal(requests, self.config.rollout.data)):
            for request in share:
                self._start(request, data_rank)

    def _start(self, request: Request, data_rank: int) -> None:
        self._serial += 1
        name = f"{self._serial}-{request.prompt.prompt_id}-{request.index}"
        params = arguments.sampling_params(
            request, self.config.rollout, self.stop_token_ids, self.max_model_len
        )
        sampling = self._sample(name, request, params, data_rank)
        task = asyncio.create_task(sampling, name=name)
        self._tasks[request.key] = task
        task.add_done_callback(self._done)

    async def _sample(self, name: str, request: Request, params: Any, data_rank: int) -> Sample:
        output = await self._generate(request.tokens, params, name, data_rank)
        sample = arguments.sample_of(request, output, None)
        if self._tasks.pop(request.key, None):  # not aborted
            self._finished.append(sample)
            self._news.set()
        return sample

    async def abort(self, keys: Sequence[SampleKey]) -> Any:
        """Aborts the requests that are running; returns their samples so far, packed."""
        tasks = [self._tasks.pop(key) for key in keys if key in self._tasks]
        await self.llm.abort([task.get_name() for task in tasks])
        return pack(await asyncio.gather(*tasks)).numpy()

    async def drop(self) -> None:
        """Ends all requests, and forgets their samples."""
        await self.abort(list(self._tasks))
        self._finished.clear()
        self._news.set()  # an open poll ends

    async def poll(self) -> Any:
        """Waits until samples are finished; returns them packed."""
        await self._news.wait()
        self._news.clear()
        samples = self._finished
        self._finished = []
        return pack(samples).numpy()

    # the sync

    async def join(self, group: Mapping[str, Any]) -> list[Reply]:
        # a step waits for all data ranks, each of which would join before another step
        await self.llm.pause_generation(mode="keep", clear_cache=False)
        return await self._on_workers("sync_join", group, self.replica, str(self.folder))

    async def transfer(self, version: int) -> list[Reply]:
        """Pauses, and receives `version`; requests that were running wait for `end`."""
        self.is_ready = False
        await self.llm.pause_generation(mode="keep", clear_cache=True)
        return await self._on_workers("sync_transfer", version)

    async def open(self, version: int) -> None:
        """Runs the probe, and what was running before the sync, under uncommitted weights."""
        await self.llm.reset_prefix_cache()
        await self.llm.update_weight_version(str(version))
        await self.llm.resume_generation()

    async def end(self, version: int, committed: bool) -> list[Reply]:
        replies = await self._on_workers("sync_end", version, committed)
        if committed:
            await self.open(version)
            self.is_ready = True
        return replies

    async def _on_workers(self, method: str, *values: Any) -> list[Reply]:
        """Returns the replies of all workers; AsyncLLM.collective_rpc returns the first core's."""
        by_core = await self.llm.engine_core.call_utility_all_async(
            "collective_rpc", method, None, values, None
        )
        replies = list(chain.from_iterable(by_core))
        for rank, reply in enumerate(replies):
            if "error" in reply:
                reply["error"] = f"rank {rank} of engine {self.replica}: {reply['error']}"
        return replies

    # the probe (parity.gate)

    async def complete(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Tensor]:
        """See Engine.complete."""
        params = arguments.completion_params(prompts, max_tokens, self.max_model_len)
        outputs = await self._all([list(prompt) for prompt in prompts], params)
        return arguments.completions(prompts, outputs)

    async def score(self, rows: Iterable[Sequence[int]]) -> list[Tensor]:
        """See Engine.score."""
        prompts = [list(row) for row in rows]
        outputs = await self._all(prompts, [arguments.scoring_params() for _ in prompts])
        return [torch.tensor(output.prompt_logprobs.logprobs) for output in outputs]

    async def _all(self, prompts: list[list[int]], params: Sequence[Any]) -> list[Any]:
        self._serial += 1
        numbers = range(len(prompts))
        names = [f"probe-{self._serial}-{number}" for number in numbers]
        ranks = [number % self.config.rollout.data for number in numbers]
        return await asyncio.gather(*map(self._generate, prompts, params, names, ranks))

    async def _generate(self, tokens: list[int], params: Any, name: str, data_rank: int) -> Any:
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.FINAL_ONLY
        final = None
        async for output in self.llm.generate(
            {"prompt_token_ids": tokens}, params, request_id=name, data_parallel_rank=data_rank
        ):
            final = output
        return final

    # its end

    async def _check_core(self) -> None:
        """Marks the engine as lost if its core hangs.

        A core answers between two steps, and a sync ends by the time-out.
        """
        limit_s = SILENT * self.config.launch.timeout_s
        while not self._error:
            await asyncio.sleep(CHECK_S)
            try:
                await asyncio.wait_for(self.llm.is_sleeping(), limit_s)
            except TimeoutError:
                self.lose(f"its core has not answered for {limit_s:g} s")
            except Exception:  # noqa: BLE001 (it is dead: its process is watched)
                return

    def _done(self, task: asyncio.Task[Sample]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error:
            self.lose(f"{type(error).__name__}: {error}")

    def lose(self, cause: str) -> None:
        self._error = self._error or f"engine {self.replica} is lost: {cause}"
        self.is_ready = False
        self.children.lost.set()


def serve_part(config: Config, folder: Path, part: Part) -> None:
    """Starts the cores and workers of one node, which join those of the replica's first part;
    returns once one of them has ended."""
    engine_args = _engine_args(config, folder, part)
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.network_utils import get_tcp_uri
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    vllm_config = engine_args.create_engine_config(UsageContext.ENGINE_CONTEXT, headless=True)
    sizes = vllm_config.parallel_config
    if sizes.node_rank_within_dp > 0:  # its data rank's core is on another node
        MultiprocExecutor(vllm_config, monitor_workers=False).start_worker_monitor(inline=True)
        return
    cores = CoreEngineProcManager(
        local_engine_count=sizes.data_parallel_size_local,
        start_index=sizes.data_parallel_rank,
        local_start_index=0,
        vllm_config=vllm_config,
        local_client=False,
        handshake_address=get_tcp_uri(part.host, sizes.data_parallel_rpc_port),
        executor_class=Executor.get_class(vllm_config),
        log_stats=False,
    )
    cores.monitor_engine_liveness()


def _engine_args(config: Config, folder: Path, part: Part) -> Any:
    """Returns vLLM's AsyncEngineArgs; sets the environment of its processes."""
    rollout = config.rollout
    # a core has a single worker in its own process
    executor = "uni" if rollout.ranks_per_sampler == 1 else "mp"
    # read when vLLM is imported, and inherited by its processes
    set_env(
        VLLM_LOGGING_LEVEL=get_env("VLLM_LOGGING_LEVEL") or "ERROR",
        VLLM_NO_USAGE_STATS=1,
        VLLM_LOGGING_STREAM="ext://sys.stderr",
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        # tensor 2 runs on one NUMA node
        VLLM_CPU_OMP_THREADS_BIND=get_env("VLLM_CPU_OMP_THREADS_BIND") or "nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING=0 if rollout.ranks_per_replica == 1 else None,
        TOKENIZERS_PARALLELISM="false",
    )
    from vllm.engine.arg_utils import AsyncEngineArgs

    if arguments.is_eager(rollout):
        # a compiler stance does not apply to child processes
        set_env(TORCHDYNAMO_DISABLE=1)
    settings = arguments.engine_settings(
        folder,
        rollout,
        DTYPES[config.train.dtype],
        trust_remote_code=config.model.trust_remote_code,
    )
    return AsyncEngineArgs(
        model=str(folder),
        distributed_executor_backend=executor,
        worker_extension_cls=EXTENSION,
        disable_log_stats=True,
        **settings,
        **part.settings,
    )
