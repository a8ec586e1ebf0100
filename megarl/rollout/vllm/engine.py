"""One rank of a vLLM replica, in this process and on its torch.distributed world.

    requests --token ids--> vLLM --token ids, log-probs of the sampled distribution--> Samples

No text goes in or out. All ranks of a replica submit the same requests in the same order (vLLM's external launcher).
The engine starts with dummy weights and samples only after a successful sync (weight_loader.py).
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.schema import Rollout
from megarl.models.formats import BlockFormat
from megarl.models.fp8 import scale_shapes
from megarl.models.lora import AdapterFormat
from megarl.models.registry import read_model
from megarl.platform.env import Env, get_env, set_env
from megarl.platform.shm import lock_shm, shm_prefix, unlink_dead, unlink_shm
from megarl.roles import Finished
from megarl.rollout import arguments
from megarl.rollout.arguments import engine_settings
from megarl.rollout.routes import RouteCapture, capture_of
from megarl.types import CheckFailed, Request, Routes, Sample
from megarl.weights.publish import WeightFormat

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

    from megarl.rollout.adapters import AdapterReceiver
    from megarl.rollout.weight_loader import LayerReceiver

Read = Callable[[Any, int], Any]  # of a RequestOutput and the prompt's length


class Engine:
    """roles.Sampler. `start` is a collective: call it on every rank of an initialised world."""

    def __init__(
        self, llm: LLM, rollout: Rollout, stop_token_ids: Sequence[int], receiver: LayerReceiver | AdapterReceiver,
        eager: bool, capture: RouteCapture | None = None,
    ) -> None:  # fmt: skip
        """`capture` None: no experts, or vLLM cannot show their choice."""
        self.receiver = receiver
        self.max_model_len = (
            llm.model_config.max_model_len
        )  # tokens of a prompt and its response together
        self._llm, self._rollout, self._stop_token_ids, self._eager = (
            llm,
            rollout,
            list(stop_token_ids),
            eager,
        )
        self._capture = capture
        self._asleep: list[str] = []  # the parts that are off the device
        self.bytes_asleep = (
            0  # of the device; vLLM unmaps them, but torch still counts them as allocated
        )

    @classmethod
    def start(
        cls,
        folder: Path,
        rollout: Rollout,
        env: Env,
        *,
        stop_token_ids: Sequence[int],
        weights: WeightFormat,  # of the trainer
        fp8: BlockFormat | None = None,
        trust_remote_code: bool = False,
        adapters: AdapterFormat | None = None,  # that are synced apart from the base weights
    ) -> Engine:
        """Starts vLLM with dummy weights: of `folder`, only the config is read. `fp8`: the blocks of its linear layers.
        Raises CheckFailed if the engine's weight loaders cannot be called shard by shard."""
        assert dist.is_initialized(), "the engine joins an existing torch.distributed world"
        prefix = _prepare(env)
        from vllm import LLM

        from megarl.rollout import patches
        from megarl.rollout.adapters import AdapterReceiver, engine_options, unwrapped
        from megarl.rollout.weight_loader import LayerReceiver

        eager = arguments.is_eager(rollout)
        settings = engine_settings(
            folder, rollout, weights.dtype, fp8, trust_remote_code=trust_remote_code
        )
        settings |= engine_options(adapters) if adapters else {}
        quiet = warnings.catch_warnings(action="ignore", category=FutureWarning)
        with (
            patches.segment_names(prefix),
            patches.fp8_kernels(),
            patches.moe_without_lora(),
            _compiler(eager),
            quiet,
        ):
            llm = LLM(str(folder), distributed_executor_backend="external_launcher", **settings)
        dist.barrier()
        # all ranks have mapped the segments: unlinked, they are freed when the last rank ends, however it ends
        unlink_shm(prefix, lock=not env.launched)
        # vLLM would destroy the default process group, which is also the trainer's, when collected or at exit
        engine_core: Any = llm.llm_engine.engine_core
        engine_core._finalizer.detach()
        model = llm.apply_model(lambda model: model)[0]
        weights = weights.in_fp8(scale_shapes(read_model(folder), fp8)) if fp8 else weights
        capture = capture_of(llm, model, rollout, eager=eager)
        reset_cache = capture.reset_cache if capture else llm.reset_prefix_cache
        with unwrapped(model):
            receiver = LayerReceiver(model, weights, reset_cache)
        if adapters:
            receiver = AdapterReceiver(model, receiver, adapters, reset_cache)
        return cls(llm, rollout, stop_token_ids, receiver, eager, capture)

    def before_steps(self, function: Callable[[], None]) -> None:
        """Calls `function` before every step of the engine."""
        step = self._llm.llm_engine.step
        self._llm.llm_engine.step = lambda: (function(), step())[1]  # type: ignore[method-assign]

    def close(self) -> None:
        """Frees memory and process groups, so that another engine can start in this process."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        self.receiver.abort()
        self._llm.llm_engine.model_executor.shutdown()
        destroy_model_parallel()

    def sleep(self) -> None:
        """On a GPU: frees the cache, and moves the weights to the host (level 1) or frees them (2) until a sync."""
        level = self._rollout.sleep_level
        if level and torch.cuda.is_available() and not self._asleep:
            if level == 2:
                self.receiver.abort()  # without weights there is no version to serve if the sync fails
            self.bytes_asleep -= _free_bytes()
            self._llm.sleep(level=level)
            self.bytes_asleep += _free_bytes()
            self._asleep = ["weights", "kv_cache"]

    def wake(self, part: str) -> None:
        """Restores the memory of the "weights" before a sync, or of the "kv_cache" before sampling."""
        if part in self._asleep:
            self.bytes_asleep -= _free_bytes()
            self._llm.wake_up(tags=[part])
            self.bytes_asleep += _free_bytes()
            self._asleep.remove(part)

    def sample(
        self,
        requests: Sequence[Request],
        *,
        version: int,
        finished: Finished = lambda samples: None,
    ) -> list[Sample]:
        """Returns one sample per request, in the same order; each is passed to `finished` as soon as it is finished.

        Raises CheckFailed if the engine is asleep or lacks weights of `version`, ValueError if a prompt is too long.
        """
        if self._asleep and self.receiver.version == version:
            raise CheckFailed(
                f"the engine is asleep ({' and '.join(self._asleep)} off the device); wake it first"
            )
        if self.receiver.state != "ready" or self.receiver.version != version:
            raise CheckFailed(
                f"the engine has no verified weights of version {version} "
                f"(state {self.receiver.state}, version {self.receiver.version}); publish them first"
            )
        params = [
            arguments.sampling_params(
                request, self._rollout, self._stop_token_ids, self.max_model_len
            )
            for request in requests
        ]
        samples: dict[int, Sample] = {}
        capture = self._capture if self._rollout.router_replay == "engine" else None
        for outputs in self._steps([list(request.prompt.tokens) for request in requests], params):
            new = {
                number: arguments.sample_of(requests[number], output, version, capture)
                for number, output in outputs
            }
            samples |= new
            finished(list(new.values()))
        return [samples[number] for number in range(len(requests))]

    def complete(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[Tensor]:
        """Returns each prompt [L] with `max_tokens` more tokens, sampled at temperature 1 past any end token, under the
        latest weights, committed or not."""
        params = arguments.completion_params(prompts, max_tokens, self.max_model_len)
        outputs = self._uncommitted([list(prompt) for prompt in prompts], params)
        return [
            torch.tensor([*p, *output.outputs[0].token_ids])
            for p, output in zip(prompts, outputs, strict=True)
        ]

    def score(self, rows: Iterable[Tensor]) -> list[Tensor]:
        """Returns, for each row [L] of tokens, [L - 1] fp32: log-probs of row[1:] at temperature 1, under the latest
        weights, committed or not."""
        return self._score(rows, None)[0]

    def score_with_routes(self, rows: Iterable[Tensor]) -> tuple[list[Tensor], tuple[Routes, ...]]:
        """Returns what `score` does and the routes of each row in the same pass; () if vLLM cannot show them."""
        with nullcontext() if self._capture is None else self._capture.capturing():
            return self._score(rows, self._capture)

    def _score(
        self, rows: Iterable[Tensor], capture: RouteCapture | None
    ) -> tuple[list[Tensor], tuple[Routes, ...]]:
        def read(output: Any, length: int) -> tuple[Tensor, Routes | None]:
            return torch.tensor(output.prompt_logprobs.logprobs), capture and capture.of(
                output, length
            )

        prompts = [row.tolist() for row in rows]
        # prompts with log-probs are computed anew, not found in the prefix cache
        found = self._uncommitted(prompts, [arguments.scoring_params()] * len(prompts), read)
        return [scores for scores, _ in found], tuple(routes for _, routes in found if routes)

    def best(self, rows: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Returns, for each row [L], the likeliest token at each position after the first, [L - 1] int64, and its
        log-prob [L - 1] fp32 at temperature 1."""
        from vllm import SamplingParams

        prompts = [row.tolist() for row in rows]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        outputs = self._uncommitted(prompts, [params] * len(prompts))
        entries: list[Any] = [(output.prompt_logprobs or [])[1:] for output in outputs]
        best = [
            [next((token, x.logprob) for token, x in entry.items() if x.rank == 1) for entry in row]
            for row in entries
        ]
        return [
            (torch.tensor([t for t, _ in row]), torch.tensor([x for _, x in row])) for row in best
        ]

    def states(
        self,
        rows: Sequence[Tensor],
        projection_HP: Tensor | None = None,
        names: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """Returns the outputs of each sublayer at the T tokens of `rows`: [T, P], or [T, H] without a projection; {} if
        the engine is compiled, as nothing can be seen inside."""
        if not self._eager:
            return {}
        from megarl.rollout.sublayers import engine_sublayers, record_states

        modules = engine_sublayers(self._llm.apply_model(lambda model: model)[0])
        modules = {
            name: module for name, module in modules.items() if names is None or name in names
        }
        found: dict[str, list[Tensor]] = {name: [] for name in modules}
        for row in rows:  # one at a time: each output has its tokens, in order
            with record_states(modules, projection_HP) as kept:
                self.score([row])
            for name, outputs in kept.items():
                found[name].append(torch.cat(outputs)[: len(row)])
        return {name: torch.cat(outputs) for name, outputs in found.items()}

    @property
    def is_asleep(self) -> bool:
        return bool(self._asleep)

    def _uncommitted(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        read: Read = lambda output, _length: output,
    ) -> list[Any]:
        """Returns `read(output, prompt length)` of each."""
        assert self.receiver.state in ("sealed", "ready"), (
            f"no weights to run: state {self.receiver.state}"
        )
        self.wake(
            "kv_cache"
        )  # a sync wakes the weights only, and vLLM schedules nothing before both are awake
        steps = self._steps(prompts, params)
        found = {
            number: read(output, len(prompts[number]))
            for outputs in steps
            for number, output in outputs
        }
        return [found[number] for number in range(len(prompts))]

    def _steps(
        self, prompts: list[list[int]], params: list[SamplingParams]
    ) -> Iterator[list[tuple[int, Any]]]:
        """Yields the numbers of the prompts that a step has finished, and RequestOutputs under the engine's own ids."""
        if not prompts:
            return
        with _compiler(self._eager):
            inputs: Any = [{"prompt_token_ids": tokens} for tokens in prompts]
            ids = self._llm.enqueue(
                inputs, params, lora_request=self.receiver.request, use_tqdm=False
            )
            # an output has its id up to the "-"
            numbers = {
                request_id.partition("-")[0]: number for number, request_id in enumerate(ids)
            }
            while self._llm.llm_engine.has_unfinished_requests():
                done = [output for output in self._llm.llm_engine.step() if output.finished]
                finished = [(numbers[output.request_id], output) for output in done]
                for number, output in finished:
                    output.request_id = ids[number]
                if finished:
                    yield finished


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def _prepare(env: Env) -> str:
    """Sets the environment that vLLM reads, and removes the shared memory of dead jobs; returns this job's prefix."""
    if "vllm" not in sys.modules:
        set_env(
            VLLM_ENABLE_V1_MULTIPROCESSING=0,  # the engine core runs in this process
            VLLM_LOGGING_LEVEL=get_env("VLLM_LOGGING_LEVEL")
            or "ERROR",  # it warns about intended settings
            VLLM_NO_USAGE_STATS=1,
        )
    # the external launcher reads the rank from the environment
    set_env(RANK=dist.get_rank(), WORLD_SIZE=dist.get_world_size(), LOCAL_RANK=env.local_rank)
    prefix = shm_prefix(env.job_id, os.getppid())
    if env.local_rank == 0:
        unlink_dead()
        unlink_shm(prefix)
        if not env.launched:  # megarl's launcher holds the lock
            lock_shm(prefix)
    dist.barrier()
    return prefix


def _compiler(eager: bool) -> AbstractContextManager[Any]:
    """With `eager` nothing is compiled: vLLM would still compile two sampling helpers, 4-17 s of C++ on a CPU."""
    return torch.compiler.set_stance("force_eager") if eager else nullcontext()
