"""Mistakes that `benchmarks.gpu_contract sync` plants, one at a time, and must name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from torch import nn

from megarl.models.formats import ENGINE_FORMATS


@dataclass(frozen=True)
class Plant:
    """A mistake in a sync of `case`, which the comparison must report for a tensor whose path ends with `path`."""

    case: str
    path: str
    says: str  # part of the report
    patches: Callable[[], Any] = nullcontext  # a context around all syncs
    before: Callable[[Any], object] = lambda model: None  # called with the model before the first
    after: Callable[[Any], object] = lambda model: None  # and after each


def scales_of_any_size() -> Any:
    formats = [replace(fmt, power_of_2=False) for fmt in ENGINE_FORMATS["fp8"]]
    return patch.dict(ENGINE_FORMATS, fp8=formats)


def swap_gate_and_up(model: Any) -> None:
    for name, weight in model.named_parameters():
        if name.endswith("w13_weight"):
            weight.data.copy_(weight.roll(weight.shape[1] // 2, 1))


def leave_latent_weights() -> Any:
    return patch(f"{LOADER}.is_deferred_attention_layer", lambda layer: False)


def leave_cache_scales() -> Any:
    return patch(f"{LOADER}.reset_cache_scales", lambda model: None)


def copy_head(model: Any) -> None:
    """The head multiplies by a copy of the embedding, as one that packs its weight does."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)


def move_norm(model: Any) -> None:
    weight = model.model.norm.weight
    weight.data = weight.data.clone()


LOADER = "megarl.rollout.vllm.weight_loader"
PLANTS = {
    "requantised": Plant("qwen3:fp8", "o_proj.weight", "quantised again", scales_of_any_size),
    "w13": Plant("qwen3_moe:bf16", "w13_weight", "bytes differ", after=swap_gate_and_up),
    "w_uk": Plant("deepseek_v3:fp8", "W_UK_T", "bytes differ", leave_latent_weights),
    "kv_scale": Plant("qwen3:fp8", "_k_scale", "bytes differ", leave_cache_scales),
    "tied_head": Plant("qwen3_tied:bf16", "lm_head.weight", "bytes differ", before=copy_head),
    "moved": Plant("llama:bf16", "model.norm.weight", "has moved", after=move_norm),
}
