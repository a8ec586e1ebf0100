"""One rank of a vLLM replica, in this process and on its torch.distributed world.

    requests --token ids--> vLLM --token ids, log-probs of the sampled distribution--> Samples

No text goes in or out. vLLM's external launcher wants the same requests in the same order on the
tensor ranks of a data rank. So before the first step of each `poll`, in which nothing can arrive,
they agree on what has arrived and was aborted (with a time-out before each step, on whether it is
over). Data ranks have requests of their own and step together, until all call `finish`:

    submit, abort --news--> all-reduce of its hash --equal, or else gathered--> the first rank's
    news on every rank --> vLLM --> one step

The engine starts with dummy weights and samples only after a successful sync (weight_loader.py).
"""

from __future__ import annotations

import math
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.schema import Rollout
from megarl.data.tasks import hash31
from megarl.models.lora import AdapterFormat
from megarl.platform.env import Env, get_env, set_env
from megarl.processes.shared_memory import lock_shm, shm_prefix, unlink_dead, unlink_shm
from megarl.rollout.sampling import check_new, check_running, name_of, unsampled
from megarl.rollout.vllm import arguments
from megarl.rollout.vllm.arguments import engine_settings
from megarl.rollout.vllm.routes import RouteCapture, capture_of
from megarl.types import CheckFailed, Prompt, Request, Routes, Sample, SampleKey
from megarl.weights.sync.publish import WeightFormat
from megarl.weights.sync.transports.values import gather_values

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

    from megarl.rollout.vllm.adapters import AdapterReceiver
    from megarl.rollout.vllm.weight_loader import LayerReceiver

POLL_STEPS = 8  # fewest steps of a poll of several ranks: agreeing takes a CPU 0.2 ms
T = TypeVar("T")


@dataclass(eq=False)
class Engine:
    """roles.Engine. `start` is a collective: call it on every rank of an initialised world."""

    _llm: LLM
    _rollout: Rollout
    _stop_token_ids: Sequence[int]
    receiver: LayerReceiver | AdapterReceiver
    eager: bool
    _capture: RouteCapture | None = None  # None: no experts, or vLLM cannot show them
    before_step: Callable[[], None] = lambda: None  # called before every step
    # context of `complete`, `score`, `best` and `states`: TimedPhases.engine_turn
    turn: Callable[[], AbstractContextManager[None]] = nullcontext
    bytes_asleep: int = 0  # freed by vLLM, although torch counts them as allocated
    _asleep: list[str] = field(default_factory=list)  # the parts that are not on the device
    _ranks: Any = None  # gloo process group of the replica; None: one rank
    _version: int | None = None  # the version of the weights that sample now
    _is_open: bool = False  # requests may arrive: `finish` was not called since the last
    # since the last step, each with its SamplingParams
    _arrived: dict[SampleKey, tuple[Request, SamplingParams]] = field(default_factory=dict)
    _aborted: list[SampleKey] = field(default_factory=list)
    # requests that vLLM has, its id of each, and the id in its outputs -> key
    _requests: dict[SampleKey, Request] = field(default_factory=dict)
    _ids: dict[SampleKey, str] = field(default_factory=dict)
    _keys: dict[str, SampleKey] = field(default_factory=dict)

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its response together."""
        return self._llm.model_config.max_model_len

    @classmethod
    def start(
        cls,
        folder: Path,
        rollout: Rollout,
        env: Env,
        *,
        stop_token_ids: Sequence[int],
        weights: WeightFormat,  # as they move
        trust_remote_code: bool = False,
        adapters: AdapterFormat | None = None,  # synced apart from the base weights
    ) -> Engine:
        """Starts vLLM with dummy weights: of `folder`, only the config is read.

        Raises CheckFailed if the engine's weight loaders cannot be called shard by shard.
        """
        assert dist.is_initialized(), "the engine joins an existing torch.distributed world"
        prefix = _prepare(env, rollout.ranks_per_replica)
        from vllm import LLM
        from vllm.distributed.parallel_state import get_tp_group

        from megarl.patches import vllm as patches
        from megarl.rollout.vllm.adapters import AdapterReceiver, engine_options, unwrapped
        from megarl.rollout.vllm.weight_loader import LayerReceiver

        if rollout.expert > 1:
            patches.install_expert_parallel()
        eager = arguments.is_eager(rollout)
        settings = engine_settings(
            folder,
            rollout,
            weights.dtype,
            weights.storage.block_format,
            trust_remote_code=trust_remote_code,
        )
        if adapters:
            settings |= engine_options(adapters)
        quiet = warnings.catch_warnings(action="ignore", category=FutureWarning)
        # on another host the same name would be other memory; vLLM uses none if names differ
        with patches.applied(f"{prefix}{socket.gethostname()}-"), _compiler(eager), quiet:
            llm = LLM(str(folder), distributed_executor_backend="external_launcher", **settings)
        dist.barrier()
        # all ranks have mapped the segments: unlinked, they go when the last rank ends
        unlink_shm(prefix, lock=not env.launched)
        model = llm.apply_model(lambda model: model)[0]
        capture = capture_of(llm, model, rollout, eager=eager)
        reset_cache = llm.reset_prefix_cache
        if capture:
            reset_cache = capture.reset_cache
        with unwrapped(model):
            receiver = LayerReceiver(model, weights, reset_cache)
        if adapters:
            receiver = AdapterReceiver(model, receiver, adapters, reset_cache)
        engine = cls(llm, rollout, stop_token_ids, receiver, eager, capture)
        if get_tp_group().world_size > 1:
            engine._ranks = get_tp_group().cpu_group
        return engine

    def close(self) -> None:
        """Frees memory and process groups, so that another engine can start in this process."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        self.receiver.abort()
        self._llm.llm_engine.model_executor.shutdown()
        destroy_model_parallel()

    def sleep(self) -> None:
        """Frees a GPU's cache, and offloads the weights (level 1) or frees them (level 2)."""
        level = self._rollout.sleep_level
        if level and "weights" not in self._asleep:
            if level == 2:
                # without weights there is no version to serve if the sync fails
                self.receiver.abort()
            self.bytes_asleep -= _free_bytes()
            self._llm.sleep(level=level)
            self.bytes_asleep += _free_bytes()
            self._asleep = ["weights", "kv_cache"]

    def free_cache(self) -> None:
        """Frees a GPU's KV cache and keeps the weights; `wake` allocates it again."""
        if self._rollout.sleep_level and not self._asleep:
            self.bytes_asleep -= _free_bytes()
            self._llm.sleep(level=0)  # pauses the scheduler, which vLLM requires
            self._llm.release_kv_cache_memory()
            self.bytes_asleep += _free_bytes()
            self._asleep = ["kv_cache"]

    def wake(self, part: str) -> None:
        """Restores the memory of the "weights" before a sync, of the "kv_cache" before sampling."""
        if part in self._asleep:
            self.bytes_asleep -= _free_bytes()
            self._llm.wake_up(tags=[part])
            self.bytes_asleep += _free_bytes()
            self._asleep.remove(part)

    def submit(self, requests: Sequence[Request]) -> None:
        """See roles.Sampler. Raises CheckFailed if the engine is asleep, too."""
        if self.receiver.state != "ready":
            raise CheckFailed(
                f"the engine has no verified weights (state {self.receiver.state}, version "
                f"{self.receiver.version}); publish them first"
            )
        if self._asleep:
            raise CheckFailed(
                f"the engine is asleep ({' and '.join(self._asleep)} off the device); wake it first"
            )
        check_new(requests, [*self._requests, *self._arrived])
        arrived = {request.key: (request, self._params(request)) for request in requests}
        if not self.running():
            self._version = self.receiver.version
        self._is_open = True
        self._arrived |= arrived

    def poll(self, timeout_s: float | None = None) -> list[Sample]:
        """See roles.Sampler. Makes at least one step; the first rank's clock counts."""
        end = math.inf if timeout_s is None else monotonic() + timeout_s
        is_over = self._agree(monotonic() >= end)
        steps_left = POLL_STEPS if self._ranks is not None and timeout_s is None else 1
        samples = []
        with _compiler(self.eager):
            while self._requests:
                if self.receiver.version != self._version:
                    raise CheckFailed(
                        f"the weights changed from version {self._version} to "
                        f"{self.receiver.version} while {self.running()} requests are running"
                    )
                self._someone_samples(True)
                samples += [self._take(output) for output in self._step()]
                steps_left -= 1
                if is_over or (samples and steps_left <= 0):
                    break
                if timeout_s is not None:  # else nothing can arrive before this call returns
                    is_over = self._agree(monotonic() >= end)
        return samples

    def abort(self, keys: Sequence[SampleKey]) -> list[Sample]:
        """See roles.Sampler."""
        from vllm.v1.engine import FinishReason

        check_running(keys, [*self._requests, *self._arrived])
        states = self._llm.llm_engine.output_processor.request_states
        samples = []
        for key in keys:
            if key in self._arrived:
                request, _ = self._arrived.pop(key)
                samples.append(unsampled(request))
            else:
                state = states[self._ids[key]]
                output: Any = state.make_request_output([], None, FinishReason.ABORT, None)
                samples.append(self._sample_of(key, output))
                self._aborted.append(key)
        return samples

    def running(self) -> int:
        """See roles.Sampler."""
        return len(self._requests) + len(self._arrived)

    def finish(self) -> None:
        """See roles.Engine."""
        with _compiler(self.eager):
            while self._is_open and self._someone_samples(False):
                self._step()
        self._is_open = False

    def _someone_samples(self, is_sampling: bool) -> bool:
        """Returns True if a data rank of the replica has requests; if this one has none, the next
        step is an empty batch. Every data rank calls it before every step."""
        if self._rollout.data == 1:
            return is_sampling
        try:
            return self._llm.llm_engine.has_unfinished_requests_dp(is_sampling)
        except RuntimeError as error:
            self._is_open = False  # no step can follow
            what = "samples" if is_sampling else "has no more requests"
            raise RuntimeError(
                f"rank {dist.get_rank()} {what}, and waited before an engine step for the other "
                f"data ranks of its replica: one of them has stopped early, or is stuck ({error})"
            ) from None

    def _params(self, request: Request) -> SamplingParams:
        return arguments.sampling_params(
            request, self._rollout, self._stop_token_ids, self.max_model_len
        )

    def _take(self, output: Any) -> Sample:
        """Returns the sample of a request that is finished."""
        key = self._keys.pop(output.request_id)
        sample = self._sample_of(key, output)
        del self._ids[key]
        return sample

    def _sample_of(self, key: SampleKey, output: Any) -> Sample:
        output.request_id = self._ids[key]
        capture = None
        if self._rollout.router_replay == "engine":
            capture = self._capture
        request = self._requests.pop(key)
        return arguments.sample_of(request, output, self.receiver.version, capture)

    def _agree(self, is_over: bool) -> bool:
        """Passes the requests and aborts of the replica's first rank to vLLM; returns that rank's
        `is_over`.

        Raises CheckFailed on all ranks if another rank was given a request or abort that the first
        was not.
        """
        if self._ranks is not None:
            hashed = hash31(str([item[:3] for item in self._news()]))
            votes = torch.tensor([hashed, -hashed, is_over and dist.get_rank(self._ranks) == 0])
            dist.all_reduce(votes, dist.ReduceOp.MAX, self._ranks)
            largest, negated_least, is_over = votes.tolist()
            if largest != -negated_least:
                self._take_news_of_first()
        for key in self._aborted:
            internal = self._ids.pop(key)
            del self._keys[_external(internal)]
            self._requests.pop(key, None)
            self._llm.llm_engine.abort_request([internal], internal=True)
        arrived = self._arrived.values()
        params = [params for _, params in arrived]
        ids = self._enqueue([request.tokens for request, _ in arrived], params)
        self._ids |= zip(self._arrived, ids, strict=True)
        self._keys |= zip(map(_external, ids), self._arrived, strict=True)
        self._requests |= {request.key: request for request, _ in arrived}
        self._arrived = {}
        self._aborted = []
        return bool(is_over)

    def _news(self) -> list[tuple[Any, ...]]:
        """Returns the aborted keys, and the fields of arrived requests that other ranks need."""
        arrived = [
            (*request.key, request.seed, request.temperature, request.tokens)
            for request, _ in self._arrived.values()
        ]
        return [*self._aborted, *arrived]

    def _take_news_of_first(self) -> None:
        first, *others = gather_values(self._news(), self._ranks)
        for rank, news in enumerate(others, 1):
            for item in news:
                if item not in first:
                    done = "submitted to" if item[2:] else "aborted at"
                    raise CheckFailed(
                        f"{name_of(item[:2])} was {done} rank {rank} of an engine replica, but not "
                        "its first rank, which decides what the replica samples"
                    )
        self._aborted = [item for item in first if len(item) == 2]
        for prompt_id, index, seed, temperature, tokens in filter(lambda x: x[2:], first):
            request = Request(Prompt(prompt_id, tuple(tokens), ""), index, seed, temperature)
            self._arrived.setdefault(request.key, (request, self._params(request)))

    def complete(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[Tensor]:
        """Returns each prompt with `max_tokens` more tokens, [L].

        Sampled at temperature 1 past any end token, under the latest weights, committed or not.
        """
        params = arguments.completion_params(prompts, max_tokens, self.max_model_len)
        outputs = dict(self._uncommitted([list(prompt) for prompt in prompts], params))
        return arguments.completions(prompts, _in_order(outputs))

    def score(self, rows: Iterable[Tensor]) -> list[Tensor]:
        """Returns the log-probs of row[1:] for each row [L] of tokens, [L - 1] fp32.

        At temperature 1, under the latest weights, committed or not.
        """
        return self._score(rows, None)[0]

    def score_with_choices(self, rows: Iterable[Tensor]) -> tuple[list[Tensor], tuple[Routes, ...]]:
        """Returns scores, and each row's routes in the same pass; () if vLLM cannot show them."""
        if not self._capture:
            return self._score(rows, None)
        with self._capture.capturing():
            return self._score(rows, self._capture)

    def _score(
        self, rows: Iterable[Tensor], capture: RouteCapture | None
    ) -> tuple[list[Tensor], tuple[Routes, ...]]:
        prompts = [row.tolist() for row in rows]
        # prompts with log-probs are computed anew, not found in the prefix cache
        params = [arguments.scoring_params()] * len(prompts)
        scores = {}
        routes = {}
        for number, output in self._uncommitted(prompts, params):
            scores[number] = torch.tensor(output.prompt_logprobs.logprobs)
            if capture:
                routes[number] = capture.of(output, len(prompts[number]))
        return _in_order(scores), tuple(_in_order(routes))

    def best(self, rows: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Returns the likeliest token at each position after the first, for each row [L].

        Tokens [L - 1] int64, and their log-probs [L - 1] fp32 at temperature 1.
        """
        from vllm import SamplingParams

        prompts = [row.tolist() for row in rows]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        best = {}
        for number, output in self._uncommitted(prompts, [params] * len(prompts)):
            tokens = []
            logprobs = []
            for entry in (output.prompt_logprobs or [])[1:]:
                token = next(token for token, x in entry.items() if x.rank == 1)
                tokens.append(token)
                logprobs.append(entry[token].logprob)
            best[number] = (torch.tensor(tokens), torch.tensor(logprobs))
        return _in_order(best)

    def states(
        self,
        rows: Sequence[Tensor],
        projection_HP: Tensor | None,
        names: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """Returns the outputs of each sublayer at the T tokens of `rows`.

        [T, P], or [T, H] without a projection; {} if the engine is compiled, as nothing can be seen
        inside.
        """
        if not self.eager:
            return {}
        from megarl.rollout.vllm.sublayers import engine_sublayers, record_states

        modules = engine_sublayers(self._llm.apply_model(lambda model: model)[0])
        if names is not None:
            modules = {name: module for name, module in modules.items() if name in names}
        states = {name: [] for name in modules}
        for row in rows:  # one at a time: each output has its tokens, in order
            with record_states(modules, projection_HP) as outputs:
                self.score([row])
            for name, parts in outputs.items():
                states[name].append(torch.cat(parts)[: len(row)])
        return {name: torch.cat(parts) for name, parts in states.items()}

    @property
    def is_asleep(self) -> bool:
        return bool(self._asleep)

    def _uncommitted(
        self, prompts: list[list[int]], params: list[SamplingParams]
    ) -> Iterator[tuple[int, Any]]:
        """Yields (number, output) of each prompt as it is finished, under the latest weights.

        An output has the engine's own id.
        """
        assert self.receiver.state in ("sealed", "ready"), (
            f"no weights to run: state {self.receiver.state}"
        )
        assert not self.running(), "a probe while requests are running would mix their outputs"
        with self.turn(), _compiler(self.eager):
            # a sync wakes the weights only, and vLLM schedules nothing before both are awake
            self.wake("kv_cache")
            ids = self._enqueue(prompts, params)
            numbers = {_external(name): number for number, name in enumerate(ids)}
            while self._llm.llm_engine.has_unfinished_requests():
                for output in self._step():
                    number = numbers[output.request_id]
                    output.request_id = ids[number]
                    yield number, output

    def _enqueue(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[str]:
        """Returns vLLM's ids."""
        if not prompts:
            return []
        inputs: Any = [{"prompt_token_ids": tokens} for tokens in prompts]
        return self._llm.enqueue(inputs, params, lora_request=self.receiver.request, use_tqdm=False)

    def _step(self) -> list[Any]:
        """Returns the outputs that are finished."""
        self.before_step()
        return [output for output in self._llm.llm_engine.step() if output.finished]


def _external(name: str) -> str:
    """Returns the id that an output has: vLLM's own up to the "-"."""
    return name.partition("-")[0]


def _in_order(values: dict[int, T]) -> list[T]:
    return [values[number] for number in sorted(values)]


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def _prepare(env: Env, ranks_per_replica: int) -> str:
    """Sets vLLM's environment, removes shared memory of dead jobs; returns this job's prefix."""
    if "vllm" not in sys.modules:
        set_env(
            VLLM_ENABLE_V1_MULTIPROCESSING=0,  # the engine core runs in this process
            # it warns about intended settings
            VLLM_LOGGING_LEVEL=get_env("VLLM_LOGGING_LEVEL") or "ERROR",
            VLLM_NO_USAGE_STATS=1,
        )
    # the external launcher reads the rank from the environment, and derives the data rank from it
    rank = dist.get_rank() % ranks_per_replica
    set_env(RANK=rank, WORLD_SIZE=dist.get_world_size(), LOCAL_RANK=env.local_rank)
    prefix = shm_prefix(env.job_id, os.getppid())
    if env.local_rank == 0:
        unlink_dead()
        unlink_shm(prefix)
        if not env.launched:  # megarl's launcher holds the lock
            lock_shm(prefix)
    dist.barrier()
    return prefix


def _compiler(eager: bool) -> AbstractContextManager[Any]:
    """Compiles nothing if `eager`: vLLM still would, two sampling helpers, 4-17 s on a CPU."""
    if eager:
        return torch.compiler.set_stance("force_eager")
    return nullcontext()
