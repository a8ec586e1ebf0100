"""What is handed to vLLM and what comes back, in both topologies: its settings, sampling parameters, Samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.config.schema import Rollout
from megarl.models.formats import BlockFormat
from megarl.models.fp8 import quantization_config
from megarl.models.registry import read_model
from megarl.platform.json_text import parse_json
from megarl.types import Finish, Request, Sample

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

    from megarl.rollout.routes import RouteCapture

FINISHES: dict[str | None, Finish] = {"stop": "stop", "length": "length"}


def is_eager(rollout: Rollout) -> bool:
    return not torch.cuda.is_available() if rollout.enforce_eager is None else rollout.enforce_eager


def engine_settings(
    folder: Path,
    rollout: Rollout,
    dtype: torch.dtype,
    fp8: BlockFormat | None = None,
    *,
    trust_remote_code: bool,
) -> dict[str, Any]:
    on_cpu = not torch.cuda.is_available()
    # by default none: the trainer's weights are not quantised, whatever format the model came in
    quantization = quantization_config(read_model(folder), fp8) if fp8 else None
    is_quantized = "quantization_config" in parse_json((folder / "config.json").read_bytes())
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "trust_remote_code": trust_remote_code,
        "dtype": str(dtype).removeprefix("torch."),
        "hf_overrides": {"quantization_config": quantization} if fp8 or is_quantized else {},
        "tensor_parallel_size": rollout.tensor,
        "max_model_len": rollout.max_model_len or rollout.max_prompt_tokens + rollout.max_tokens,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enforce_eager": is_eager(rollout),
        "kv_cache_memory_bytes": int(rollout.cpu_kv_cache_gb * 2**30) if on_cpu else None,
        "block_size": 32 if on_cpu else None,  # not 128: the prefix cache has no incomplete blocks
        "moe_backend": _moe_backend(),
        "enable_chunked_prefill": False
        if on_cpu
        else None,  # seeded: "CPU Generator does not use offset"
        "enable_sleep_mode": bool(rollout.sleep_level) and not on_cpu,
        "enable_return_routed_experts": rollout.router_replay == "engine" and not on_cpu,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # sample as requested, not as its generation_config.json suggests
    }
    return settings | {
        name: value for name, value in rollout.engine_options.items() if name != "unsafe"
    }


def sampling_params(
    request: Request, rollout: Rollout, stop_token_ids: Sequence[int], max_model_len: int
) -> SamplingParams:
    """Raises ValueError if the prompt is too long."""
    from vllm import SamplingParams

    tokens = len(request.prompt.tokens)
    if not 0 < tokens < max_model_len:
        raise ValueError(
            f"prompt {request.prompt.prompt_id} has {tokens} tokens, but the engine accepts 1 to {max_model_len - 1}; "
            "drop the prompt or raise rollout.max_prompt_tokens"
        )
    return SamplingParams(
        temperature=request.temperature,
        seed=request.seed,
        max_tokens=min(rollout.max_tokens, max_model_len - tokens),
        stop_token_ids=list(stop_token_ids),
        logprobs=0,  # the sampled token only
        flat_logprobs=True,  # one list, instead of a dictionary per token
        detokenize=False,
        skip_clone=True,  # the copy would be deep
    )


def completion_params(
    prompts: Sequence[Sequence[int]], max_tokens: int, max_model_len: int
) -> list[SamplingParams]:
    """Of `complete`: at temperature 1 past any end token; the engine scores one token less than it has room for."""
    from vllm import SamplingParams

    rooms = [min(max_tokens, max_model_len - 1 - len(prompt)) for prompt in prompts]
    return [
        SamplingParams(
            temperature=1.0, seed=seed, max_tokens=room, ignore_eos=True, detokenize=False
        )
        for seed, room in enumerate(rooms)
    ]


def scoring_params() -> SamplingParams:
    """Of `score`."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False
    )


def sample_of(
    request: Request,
    output: RequestOutput,
    version: int | None,
    capture: RouteCapture | None = None,
) -> Sample:
    """`version` None: the engine has stamped its tokens."""
    answer: Any = output.outputs[0]
    prompt, response = list(request.prompt.tokens), list(answer.token_ids)
    skipped = len(prompt)
    logprobs = torch.zeros(skipped + len(response))
    if response:
        logprobs[skipped:] = torch.tensor(answer.logprobs.logprobs)
    if version is None:
        spans = [(int(span.version), span.start, span.end) for span in answer.weight_versions or ()]
    else:
        spans = [(version, 0, len(response))]
    return Sample(
        prompt_id=request.prompt.prompt_id,
        index=request.index,
        tokens=torch.tensor(prompt + response),
        trainable=torch.arange(skipped + len(response)) >= skipped,
        rollout_logprobs=logprobs,
        versions=sample_versions(skipped, spans),
        finish=FINISHES.get(answer.finish_reason, "abort"),
        prompt_tokens_computed=skipped - (output.num_cached_tokens or 0),
        routes=None if capture is None else capture.of(output, len(logprobs)),
    )


def sample_versions(prompt_tokens: int, spans: Sequence[tuple[int, int, int]]) -> Tensor:
    """[L] int32: `Sample.versions` of a prompt and a response with these (version, start, end), one after the other."""
    rows = [torch.full((end - start,), version, dtype=torch.int32) for version, start, end in spans]
    return torch.cat([torch.full((prompt_tokens,), -1, dtype=torch.int32), *rows])


def _moe_backend() -> str:
    """On Blackwell, vLLM's own choice rounds the width of experts up, and the rows it adds are no checkpoint's."""
    is_blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10
    return "triton" if is_blackwell else "auto"
