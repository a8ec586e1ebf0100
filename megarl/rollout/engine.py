"""One rank of a vLLM replica, in this process and on its torch.distributed world.

    requests --token ids--> vLLM --token ids, log-probs of the sampled distribution--> Samples

No text goes in or out. All ranks of a replica submit the same requests in the same order (vLLM's external launcher).
The engine starts with dummy weights and samples only after a successful sync (weight_loader.py).
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.schema import Rollout
from megarl.models.lora import AdapterFormat
from megarl.platform.env import Env, get_env, set_env
from megarl.platform.shm import lock_shm, shm_prefix, unlink_dead, unlink_shm
from megarl.roles import Finished
from megarl.types import CheckFailed, Finish, Request, Sample

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

    from megarl.rollout.adapters import AdapterReceiver
    from megarl.rollout.weight_loader import LayerReceiver

FINISHES: dict[str | None, Finish] = {"stop": "stop", "length": "length"}


class Engine:
    """roles.Sampler. `start` is a collective: call it on every rank of an initialised world."""

    def __init__(
        self,
        llm: LLM,
        rollout: Rollout,
        stop_token_ids: Sequence[int],
        receiver: LayerReceiver | AdapterReceiver,
        eager: bool,
    ) -> None:
        self.receiver = receiver
        self.max_model_len = llm.model_config.max_model_len  # tokens of a prompt and its response together
        self._llm, self._rollout, self._stop_token_ids, self._eager = llm, rollout, list(stop_token_ids), eager
        self._asleep: list[str] = []  # the parts that are off the device
        self.bytes_asleep = 0  # of the device; vLLM unmaps them, but torch still counts them as allocated

    @classmethod
    def start(
        cls,
        folder: Path,
        rollout: Rollout,
        env: Env,
        *,
        stop_token_ids: Sequence[int],
        dtype: torch.dtype,
        shapes: Mapping[str, tuple[int, ...]],
        fp32: frozenset[str] = frozenset(),
        trust_remote_code: bool = False,
        adapters: AdapterFormat | None = None,  # that are synced apart from the base weights
    ) -> Engine:
        """Starts vLLM with dummy weights.

        `folder` has the model's config.json; its weights are not read. `shapes` has every tensor of the checkpoint
        (models.registry.hf_shapes), `fp32` those that are never bf16.
        Raises CheckFailed if the engine's weight loaders cannot be called shard by shard.
        """
        assert dist.is_initialized(), "the engine joins an existing torch.distributed world"
        prefix = _prepare(env)
        from vllm import LLM

        from megarl.rollout import patches
        from megarl.rollout.adapters import engine_options

        on_cpu = not torch.cuda.is_available()
        eager = on_cpu if rollout.enforce_eager is None else rollout.enforce_eager
        with patches.applied(prefix), _compiler(eager), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            settings: dict[str, Any] = {
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "trust_remote_code": trust_remote_code,
                "dtype": str(dtype).removeprefix("torch."),
                "tensor_parallel_size": rollout.tensor,
                "distributed_executor_backend": "external_launcher",
                "max_model_len": rollout.max_model_len or rollout.max_prompt_tokens + rollout.max_tokens,
                "gpu_memory_utilization": rollout.gpu_memory_utilization,
                "kv_cache_memory_bytes": int(rollout.cpu_kv_cache_gb * 2**30) if on_cpu else None,
                "block_size": 32 if on_cpu else None,  # not 128: the prefix cache has no incomplete blocks
                "enforce_eager": eager,
                "moe_backend": _moe_backend(),
                "enable_chunked_prefill": False if on_cpu else None,  # seeded: "CPU Generator does not use offset"
                "enable_sleep_mode": bool(rollout.sleep_level) and not on_cpu,
                "logprobs_mode": "processed_logprobs",
                "generation_config": "vllm",  # sample as requested, not as its generation_config.json suggests
            }
            settings |= engine_options(adapters) if adapters else {}
            settings |= {name: value for name, value in rollout.engine_options.items() if name != "unsafe"}
            llm = LLM(str(folder), **settings)
        dist.barrier()
        # all ranks have mapped the segments: unlinked, they are freed when the last rank ends, however it ends
        unlink_shm(prefix, lock=not env.launched)
        # vLLM would destroy the default process group, which is also the trainer's, when collected or at exit
        engine_core: Any = llm.llm_engine.engine_core
        engine_core._finalizer.detach()
        receiver = _make_receiver(llm, adapters, shapes, dtype, fp32)
        return cls(llm, rollout, stop_token_ids, receiver, eager)

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
        """Frees the cache, and moves the weights to the host (level 1) or frees them (level 2) until the next sync.

        Does nothing on a CPU.
        """
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
        self, requests: Sequence[Request], *, version: int, finished: Finished = lambda samples: None
    ) -> list[Sample]:
        """Returns one sample per request, in the same order; each is passed to `finished` as soon as it is finished.

        Raises CheckFailed if the engine is asleep or lacks weights of `version`, ValueError if a prompt is too long.
        """
        if self._asleep and self.receiver.version == version:
            raise CheckFailed(f"the engine is asleep ({' and '.join(self._asleep)} off the device); wake it first")
        if self.receiver.state != "ready" or self.receiver.version != version:
            raise CheckFailed(
                f"the engine has no verified weights of version {version} "
                f"(state {self.receiver.state}, version {self.receiver.version}); publish them first"
            )
        from vllm import SamplingParams

        limit = self.max_model_len - 1
        for request in requests:
            if not 0 < len(request.prompt.tokens) <= limit:
                raise ValueError(
                    f"prompt {request.prompt.prompt_id} has {len(request.prompt.tokens)} tokens, but the engine "
                    f"accepts 1 to {limit}; drop the prompt or raise rollout.max_prompt_tokens"
                )
        params = [
            SamplingParams(
                temperature=request.temperature,
                seed=request.seed,
                max_tokens=min(self._rollout.max_tokens, self.max_model_len - len(request.prompt.tokens)),
                stop_token_ids=self._stop_token_ids,
                logprobs=0,  # the sampled token only
                flat_logprobs=True,  # one list, instead of a dictionary per token
                detokenize=False,
                skip_clone=True,  # the copy would be deep
            )
            for request in requests
        ]
        samples: dict[int, Sample] = {}
        for outputs in self._steps([list(request.prompt.tokens) for request in requests], params):
            new = {number: _sample(requests[number], output, version) for number, output in outputs}
            samples |= new
            finished(list(new.values()))
        return [samples[number] for number in range(len(requests))]

    def complete(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[Tensor]:
        """Returns each prompt [L] with `max_tokens` more tokens, sampled at temperature 1 past any end token, under the
        latest weights, committed or not."""
        from vllm import SamplingParams

        room = [min(max_tokens, self.max_model_len - 1 - len(prompt)) for prompt in prompts]
        params = [
            SamplingParams(temperature=1.0, seed=seed, max_tokens=tokens, ignore_eos=True, detokenize=False)
            for seed, tokens in enumerate(room)
        ]
        outputs = self._uncommitted([list(prompt) for prompt in prompts], params)
        return [torch.tensor([*p, *output.outputs[0].token_ids]) for p, output in zip(prompts, outputs, strict=True)]

    def score(self, rows: Iterable[Tensor]) -> list[Tensor]:
        """Returns, for each row [L] of tokens, [L - 1] fp32: log-probs of row[1:] at temperature 1, under the latest
        weights, committed or not."""
        from vllm import SamplingParams

        prompts = [row.tolist() for row in rows]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        outputs = self._uncommitted(prompts, [params] * len(prompts))
        return [torch.tensor(output.prompt_logprobs.logprobs) for output in outputs]  # type: ignore[union-attr]

    def best(self, rows: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Returns, for each row [L], the likeliest token at each position after the first, [L - 1] int64, and its
        log-prob [L - 1] fp32 at temperature 1."""
        from vllm import SamplingParams

        prompts = [row.tolist() for row in rows]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        outputs = self._uncommitted(prompts, [params] * len(prompts))
        entries: list[Any] = [(output.prompt_logprobs or [])[1:] for output in outputs]
        best = [
            [next((token, x.logprob) for token, x in entry.items() if x.rank == 1) for entry in row] for row in entries
        ]
        return [(torch.tensor([t for t, _ in row]), torch.tensor([x for _, x in row])) for row in best]

    def states(
        self, rows: Sequence[Tensor], projection_HP: Tensor | None = None, names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Returns the outputs of each sublayer at the T tokens of `rows`: [T, P], or [T, H] without a projection.

        Returns {} if the engine is compiled: nothing can be seen inside.
        """
        if not self._eager:
            return {}
        from megarl.rollout.sublayers import engine_sublayers, record_states

        modules = engine_sublayers(self._llm.apply_model(lambda model: model)[0])
        modules = {name: module for name, module in modules.items() if names is None or name in names}
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

    def _uncommitted(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
        assert self.receiver.state in ("sealed", "ready"), f"no weights to run: state {self.receiver.state}"
        self.wake("kv_cache")  # a sync wakes the weights only, and vLLM schedules nothing before both are awake
        outputs = dict(output for outputs in self._steps(prompts, params) for output in outputs)
        return [outputs[number] for number in range(len(prompts))]

    def _steps(self, prompts: list[list[int]], params: list[SamplingParams]) -> Iterator[list[tuple[int, Any]]]:
        """Yields, after each step of the engine in which any prompt is finished, their numbers and RequestOutputs."""
        if not prompts:
            return
        with _compiler(self._eager):
            inputs: Any = [{"prompt_token_ids": tokens} for tokens in prompts]
            ids = self._llm.enqueue(inputs, params, lora_request=self.receiver.request, use_tqdm=False)
            # an output has its id up to the "-"
            numbers = {request_id.partition("-")[0]: number for number, request_id in enumerate(ids)}
            while self._llm.llm_engine.has_unfinished_requests():
                done = [output for output in self._llm.llm_engine.step() if output.finished]
                if done:
                    yield [(numbers[output.request_id], output) for output in done]


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def _sample(request: Request, output: RequestOutput, version: int) -> Sample:
    answer = output.outputs[0]
    prompt, response = list(request.prompt.tokens), list(answer.token_ids)
    skipped = len(prompt)
    logprobs = torch.zeros(skipped + len(response))
    logprobs[skipped:] = torch.tensor(answer.logprobs.logprobs)  # type: ignore[union-attr]
    return Sample(
        prompt_id=request.prompt.prompt_id,
        index=request.index,
        tokens=torch.tensor(prompt + response),
        trainable=torch.arange(skipped + len(response)) >= skipped,
        rollout_logprobs=logprobs,
        versions=(version, version),
        finish=FINISHES.get(answer.finish_reason, "abort"),
        prompt_tokens_computed=skipped - (output.num_cached_tokens or 0),
    )


def _make_receiver(
    llm: LLM,
    adapters: AdapterFormat | None,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    fp32: frozenset[str],
) -> LayerReceiver | AdapterReceiver:
    from megarl.rollout.adapters import AdapterReceiver, unwrapped
    from megarl.rollout.loader_trace import trace_loader
    from megarl.rollout.weight_loader import LayerReceiver

    model = llm.apply_model(lambda model: model)[0]
    with unwrapped(model):
        weights = LayerReceiver(model, trace_loader(model, shapes, dtype), dtype, llm.reset_prefix_cache, fp32)
    return AdapterReceiver(model, weights, adapters, llm.reset_prefix_cache) if adapters else weights


def _moe_backend() -> str:
    """On Blackwell, vLLM's own choice rounds the width of experts up, and the rows it adds are no checkpoint's."""
    is_blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10
    return "triton" if is_blackwell else "auto"


def _prepare(env: Env) -> str:
    """Sets the environment that vLLM reads, and removes the shared memory of dead jobs; returns this job's prefix."""
    if "vllm" not in sys.modules:
        set_env(
            VLLM_ENABLE_V1_MULTIPROCESSING=0,  # the engine core runs in this process
            VLLM_LOGGING_LEVEL=get_env("VLLM_LOGGING_LEVEL") or "ERROR",  # it warns about intended settings
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
