"""The Ray actors of the split topology: one per Megatron rank, one per node of an engine replica.

    controller --call--> RankActor x W    (Megatron rank; all ranks at once) --> rank 0's value
               --call--> EngineActor x R  (AsyncLLM; concurrent calls)       --> its value
                         first part of a replica --serve--> EngineActor of each other node: a part
                         that ends is the end of the replica

A call returns {"value": ...} or {"failure": ...}, so the interpretation of a failure does not
depend on how Ray wraps exceptions.
"""

import asyncio
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from megarl.config.schema import Config
from megarl.platform.env import LOOPBACK, Env, get_env, log_text, set_env
from megarl.processes.children import Children
from megarl.processes.exit_codes import DEFECT, REFUSED, Failure, failure_of, first_failure
from megarl.run.rank_process import redirect_output, trainer_variables
from megarl.split.proxy import Proxy
from megarl.split.ray_cluster import Cluster
from megarl.split.stopped_processes import Watch

if TYPE_CHECKING:  # imports torch, which an actor may import only once its environment is set
    from megarl.split.trainer_rank import TrainerRank

GRACE_S = 10.0  # time for the peers of a failed rank to fail too; the earliest failure is the cause
POLL_S = 0.5
Outcome = dict[str, Any]  # {"value": ...} or {"failure": ...}
KILLED = "was killed; out of memory? see its log"


class RankLost(RuntimeError):
    """Raised if a trainer rank has failed or died: the trainer's process group cannot continue."""

    def __init__(self, failure: Failure, is_gone: bool = False) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.is_gone = is_gone  # the process has ended; False: only the call has failed


class _Actor:
    """Base of both actors: sets the environment before torch is imported, redirects output to a
    log, and turns exceptions into failure records.
    """

    def __init__(self, number: int, log: Path, environment: Mapping[str, Any]) -> None:
        set_env(**environment)
        redirect_output(log)
        self._number = number
        self._log = log
        self._made = None
        self._span = nullcontext

    def place(self) -> tuple[str, list[int], int]:
        """Returns (node id, GPU ids of this actor on the node, process id)."""
        return (
            ray.get_runtime_context().get_node_id(),
            [int(gpu) for gpu in ray.get_gpu_ids()],
            os.getpid(),
        )

    def record_calls(self, node: int) -> None:
        """Records further calls as the timeline of this node."""
        from megarl.telemetry.log import Timeline

        file = self._log.parent.parent / f"timeline_node{node}.json"
        self._span = Timeline(file, node).span

    def _failed(self, error: BaseException) -> Outcome:
        phase = getattr(getattr(self._made, "phase", None), "name", "")
        failure = failure_of(error, self._number, phase=phase, run_dir=self._log.parent.parent)
        print(log_text("".join(traceback.format_exception(error))), file=sys.stderr, flush=True)
        return {"failure": failure}


@ray.remote
class RankActor(_Actor):
    def start(self, config: Config, env: Env, store: str, name: str) -> Outcome:
        try:
            set_env(**trainer_variables(config))
            from megarl.split.trainer_rank import TrainerRank

            self._number = env.rank
            self._made = TrainerRank(config, env, store, name)
            return {"value": None}
        except BaseException as error:  # noqa: BLE001 (every failure becomes a record)
            return self._failed(error)

    def call(self, method: str, *values: Any) -> Outcome:
        """Calls a method of the TrainerRank; only rank 0 returns its value."""
        try:
            with self._span(method):
                value = getattr(self._made, method)(*values)
            return {"value": value if self._number == 0 else None}
        except BaseException as error:  # noqa: BLE001 (every failure becomes a record)
            return self._failed(error)


@ray.remote
class EngineActor(_Actor):
    async def start(
        self, config: Config, folder: Path, stop_token_ids: Sequence[int], others: Sequence[Any]
    ) -> Outcome:
        """Starts the engine, whose other parts are the actors `others`.

        Returns ([what kill_engine takes, of each part], max_model_len).
        """
        try:
            from megarl.rollout.vllm.async_engine import AsyncEngine, Part

            host = ray.util.get_node_ip_address()
            set_env(VLLM_HOST_IP=host)
            part = Part(0, 1 + len(others), host, (_port(), _port()))
            starting = asyncio.ensure_future(
                AsyncEngine.start(config, folder, stop_token_ids, self._number, part)
            )
            ends = [
                asyncio.ensure_future(_end_of(actor, config, folder, replace(part, number=number)))
                for number, actor in enumerate(others, 1)
            ]
            await asyncio.wait({starting, *ends}, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                if end.done():
                    return {"failure": end.result()}
            made = self._made = starting.result()
            for end in ends:
                end.add_done_callback(lambda end: made.lose(end.result().message))
            remains = await asyncio.gather(*[actor.remains.remote() for actor in others])
            return {"value": ([self.remains(), *remains], made.max_model_len)}
        except BaseException as error:  # noqa: BLE001 (every failure becomes a record)
            return self._failed(error)

    async def serve(self, config: Config, folder: Path, part: Any) -> Outcome:
        """Serves one part of an engine; returns, with a failure, once the part has ended."""
        try:
            from megarl.rollout.vllm.async_engine import serve_part

            set_env(VLLM_HOST_IP=ray.util.get_node_ip_address())
            await asyncio.to_thread(serve_part, config, folder, part)
            raise RuntimeError(f"part {part.number} of engine {self._number} has ended")
        except BaseException as error:  # noqa: BLE001 (every failure becomes a record)
            return self._failed(error)

    def remains(self) -> tuple[str, list[int], list[str]]:
        """Returns (node id, process ids, shared memory segments), for kill_engine."""
        children = Children.of_this_process()
        pids = [*children.pids, os.getpid()]
        return ray.get_runtime_context().get_node_id(), pids, sorted(children.segments)

    async def call(self, method: str, *values: Any) -> Outcome:
        try:
            assert self._made
            # a poll overlaps other calls, which a timeline cannot show
            with nullcontext() if method == "poll" else self._span(method):
                return {"value": await self._made.call(method, *values)}
        except BaseException as error:  # noqa: BLE001 (every failure becomes a record)
            return self._failed(error)


async def _end_of(actor: Any, config: Config, folder: Path, part: Any) -> Failure:
    """Starts a part of an engine, and returns the cause once it has ended."""
    try:
        return (await actor.serve.remote(config, folder, part))["failure"]
    except RayError as error:
        return rank_lost(error, f"part {part.number} of the engine").failure


def _port() -> int:
    """Returns a port that is free now."""
    with socket.create_server(("", 0)) as listener:
        return listener.getsockname()[1]


def value_of(ref: Any, what: str) -> Any:
    """Waits for a call and returns its value; raises RankLost if it failed or the actor died."""
    try:
        reply: Any = ray.get(ref)
    except RayError as error:
        raise rank_lost(error, what) from None
    if "failure" in reply:
        raise RankLost(reply["failure"])
    return reply["value"]


def rank_lost(error: RayError, what: str) -> RankLost:
    is_gone = isinstance(error, RayActorError)
    cause = KILLED if is_gone else f"{type(error).__name__}: {error}"
    return RankLost(Failure(-1, DEFECT, f"{what} {cause}"), is_gone)


@dataclass(frozen=True)
class Place:
    """The placement of one kind of actor: consecutive bundles of the cluster's placement group."""

    cluster: Cluster
    watch: Watch
    first_bundle: int
    gpus: int  # GPUs per actor
    logs: Path
    parts: int = 1  # actors per engine replica

    def start(self, kind: Any, number: int, part: int = 0) -> Any:
        cluster = self.cluster
        bundle = self.first_bundle + number * self.parts + part
        strategy = PlacementGroupSchedulingStrategy(cluster.placement, bundle)
        options = {
            "num_cpus": 1,
            "num_gpus": self.gpus * cluster.has_gpus,
            "max_restarts": 0,
            "scheduling_strategy": strategy,
        }
        name = "rank"
        if kind is EngineActor:
            name = "engine"
            options["max_concurrency"] = 1000
        environment = {
            "OMP_NUM_THREADS": get_env("OMP_NUM_THREADS") or 1,
            "TOKENIZERS_PARALLELISM": "false",
        }
        if cluster.is_local:
            environment |= LOOPBACK  # must be set before torch is imported
        log = self.logs / f"{name}_{number}{f'_part_{part}' if part else ''}.log"
        return kind.options(**options).remote(number, log, environment)


@dataclass
class TrainerRanks:
    """All trainer ranks; each call is made on every rank."""

    actors: Sequence[Any]
    meanwhile: Callable[[], object] = lambda: None  # called repeatedly while `wait` waits

    @classmethod
    def start(cls, config: Config, place: Place, world: int, store: str) -> "TrainerRanks":
        """Starts the ranks, which rendezvous in `store`, and numbers them node by node.

        Raises NodeGone if a node is lost, RankLost if a rank cannot start.
        """
        ranks = cls([place.start(RankActor, number) for number in range(world)])
        name = f"trainer-{token_hex(4)}"
        with ExitStack() as stack:
            stack.callback(ranks.end)
            try:
                places = place.cluster.placed(ranks.actors)
            except RayError as error:
                raise rank_lost(error, "a rank") from None
            nodes = list(dict.fromkeys(node for node, *_ in places))
            placed = list(zip(places, ranks.actors, strict=True))
            placed.sort(key=lambda pair: (nodes.index(pair[0][0]), pair[0][1]))
            ranks.actors = [actor for _, actor in placed]
            starts = []
            for rank, (placed_at, actor) in enumerate(placed):
                place.watch.add(f"rank {rank}", actor, placed_at)
                # local rank 0: each actor sees only its own GPU, as device 0
                env = Env(rank, world, 0, max(1, world // len(nodes)), has_launcher=True)
                starts.append(actor.start.remote(config, env, store, name))
            ranks.wait(starts)
            stack.pop_all()
        return ranks

    @property
    def service(self) -> "TrainerRank":
        """A proxy that calls a method on all ranks and returns rank 0's value.

        A call raises CheckFailed if all ranks refuse, RankLost if a rank fails otherwise.
        """
        return cast("TrainerRank", Proxy(lambda *call: self.wait(self._send(*call))))

    def begin(self, ask: Callable[["TrainerRank"], Any]) -> list[Any]:
        """Starts the call that `ask` makes on all ranks, and returns its refs; `wait` waits."""
        return ask(cast("TrainerRank", Proxy(self._send)))

    def _send(self, method: str, *values: Any) -> list[Any]:
        refs = list(map(ray.put, values))
        return [actor.call.remote(method, *refs) for actor in self.actors]

    def wait(self, refs: Sequence[Any], meanwhile: Callable[[], object] | None = None) -> Any:
        """Waits for a call on all ranks and returns rank 0's value.

        Calls `meanwhile` (default: the attribute) repeatedly. Raises CheckFailed if all ranks
        refuse, RankLost otherwise, for the rank that died or else for the first failure.
        """
        from megarl.types import CheckFailed

        ranks = {ref: rank for rank, ref in enumerate(refs)}
        pending = list(refs)
        failures = []
        value = None
        deadline = None
        gone = None
        while pending and (deadline is None or time.monotonic() < deadline):
            done, pending = ray.wait(pending, timeout=POLL_S)
            (meanwhile or self.meanwhile)()
            for ref in done:
                try:
                    returned = value_of(ref, f"rank {ranks[ref]}")
                    if ranks[ref] == 0:
                        value = returned
                except RankLost as lost:
                    failures.append(lost.failure)
                    if lost.is_gone:
                        gone = gone or lost
                    deadline = deadline or time.monotonic() + GRACE_S
                    if gone:  # the dead rank is the cause: wait for no other failure
                        deadline = 0.0
        first = first_failure(failures)
        if not first:
            return value
        if [failure.code for failure in failures] == [REFUSED] * len(refs):
            raise CheckFailed(first.message)
        raise gone or RankLost(first)  # failures of a dead rank's peers are consequences

    def end(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


def kill_engine(node: str, pids: Sequence[int], segments: Sequence[str]) -> None:
    """Kills an engine's processes on its node and unlinks its shared memory segments.

    These processes outlive a killed actor.
    """
    strategy: Any = NodeAffinitySchedulingStrategy(node_id=node, soft=False)

    @ray.remote(num_cpus=0, scheduling_strategy=strategy)
    def end() -> None:
        Children(dict.fromkeys(pids, ""), set(segments)).end()

    with suppress(RayError):  # for example if the node is lost
        ray.get(end.remote(), timeout=30)
