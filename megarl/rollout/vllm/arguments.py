"""vLLM's settings, sampling parameters and outputs, in both topologies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.config.schema import Rollout
from megarl.models.engine import format_config
from megarl.models.formats import CONFIG_KEY, BlockFormat
from megarl.models.registry import read_model
from megarl.platform.json_text import read_json
from megarl.types import FINISH, Request, Sample

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

    from megarl.rollout.vllm.routes import RouteCapture


def is_eager(rollout: Rollout) -> bool:
    return not torch.cuda.is_available() if rollout.enforce_eager is None else rollout.enforce_eager


def engine_settings(
    folder: Path,
    rollout: Rollout,
    dtype: torch.dtype,
    fmt: BlockFormat | None = None,
    *,
    trust_remote_code: bool,
) -> dict[str, Any]:
    overrides: Any = {}
    if fmt:
        overrides[CONFIG_KEY] = format_config(read_model(folder), fmt)
    elif CONFIG_KEY in read_json(folder / "config.json"):
        overrides = without_quantization
    kv_cache_bytes = int(rollout.cpu_kv_cache_gb * 2**30)
    block_size = 32  # not 128: the prefix cache has no incomplete blocks
    has_chunked_prefill = False  # seeded: "CPU Generator does not use offset"
    returns_routes = False
    can_sleep = False
    if torch.cuda.is_available():
        kv_cache_bytes = block_size = has_chunked_prefill = None
        returns_routes = rollout.router_replay == "engine"
        can_sleep = bool(rollout.sleep_level)
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "trust_remote_code": trust_remote_code,
        "dtype": str(dtype).removeprefix("torch."),
        "hf_overrides": overrides,
        "tensor_parallel_size": rollout.tensor,
        "data_parallel_size": rollout.data,
        "enable_expert_parallel": rollout.expert > 1,
        "max_model_len": rollout.max_model_len or rollout.max_prompt_tokens + rollout.max_tokens,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enforce_eager": is_eager(rollout),
        "moe_backend": _moe_backend(),
        "logprobs_mode": "processed_logprobs",
        # sample as requested, not as the model's generation_config.json suggests
        "generation_config": "vllm",
        "kv_cache_memory_bytes": kv_cache_bytes,
        "block_size": block_size,
        "enable_chunked_prefill": has_chunked_prefill,
        "enable_sleep_mode": can_sleep,
        "sleep_mode_offload_cudagraph": can_sleep,
        "enable_return_routed_experts": returns_routes,
    }
    settings |= rollout.engine_options
    settings.pop("unsafe", None)
    return settings


def without_quantization(config: Any) -> Any:
    """Returns a transformers config without its format: the trainer's weights are not quantised,
    whatever format the model came in."""
    if hasattr(config, CONFIG_KEY):  # vLLM reads the key of a null, too
        delattr(config, CONFIG_KEY)
    return config


def sampling_params(
    request: Request,
    rollout: Rollout,
    stop_token_ids: Sequence[int],
    max_model_len: int,
) -> SamplingParams:
    """Raises ValueError if the prompt is too long."""
    from vllm import SamplingParams

    tokens = len(request.tokens)
    if not 0 < tokens < max_model_len:
        raise ValueError(
            f"prompt {request.prompt.prompt_id} has {tokens} tokens, but the engine accepts "
            f"1 to {max_model_len - 1}; drop the prompt or raise rollout.max_prompt_tokens"
        )
    return SamplingParams(
        temperature=request.temperature,
        seed=request.seed,
        max_tokens=min(rollout.max_tokens, max_model_len - tokens),
        stop_token_ids=list(stop_token_ids),
        logprobs=0,  # the sampled token only
        flat_logprobs=True,  # one list, instead of a dictionary per token
        detokenize=False,
        skip_clone=True,  # a deep copy for each request is slow
    )


def completion_params(
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    max_model_len: int,
) -> list[SamplingParams]:
    """Returns SamplingParams for `complete`: temperature 1, past any end token.

    The engine scores one token less than it has room for.
    """
    from vllm import SamplingParams

    return [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=min(max_tokens, max_model_len - 1 - len(prompt)),
            ignore_eos=True,
            detokenize=False,
        )
        for seed, prompt in enumerate(prompts)
    ]


def completions(prompts: Sequence[Sequence[int]], outputs: Sequence[Any]) -> list[Tensor]:
    """Returns each prompt with the tokens of its output, [L]."""
    return [
        torch.tensor([*prompt, *output.outputs[0].token_ids])
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def scoring_params() -> SamplingParams:
    """Returns SamplingParams for `score`."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
    )


def sample_of(
    request: Request,
    output: RequestOutput,
    version: int | None,
    capture: RouteCapture | None = None,
) -> Sample:
    """Returns a finished request's sample; `version` None: the engine has stamped its tokens."""
    answer: Any = output.outputs[0]
    prompt = request.tokens
    response = list(answer.token_ids)
    skipped = len(prompt)
    logprobs = torch.zeros(skipped + len(response))
    if response:
        logprobs[skipped:] = torch.tensor(answer.logprobs.logprobs)
    versions = [-1] * skipped
    if version is not None:
        versions += [version] * len(response)
    else:
        for span in answer.weight_versions or ():
            versions += [int(span.version)] * (span.end - span.start)
    finish = answer.finish_reason
    if finish not in FINISH:
        finish = "abort"
    return Sample(
        prompt_id=request.prompt.prompt_id,
        index=request.index,
        tokens=torch.tensor(prompt + response),
        trainable=torch.arange(skipped + len(response)) >= skipped,
        rollout_logprobs=logprobs,
        versions=torch.tensor(versions, dtype=torch.int32),
        finish=finish,
        prompt_tokens_computed=skipped - (output.num_cached_tokens or 0),
        choices=capture.of(output, len(logprobs)) if capture and response else None,
    )


def _moe_backend() -> str:
    """vLLM's own choice, except on Blackwell.

    There it rounds the width of experts up, and the rows it adds are no checkpoint's.
    """
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10:
        return "triton"
    return "auto"
