"""Rotary frequencies for longer contexts after pre-training: Llama 3's method, and YaRN (arXiv 2309.00071), which
Megatron-Core implements only for latent attention. Elsewhere these frequencies replace its own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megarl.models.shape import ModelShape


def scaled_frequencies(shape: ModelShape) -> Tensor:
    """Returns [rotary dim / 2] fp32 frequencies: low ones are divided by `factor`, with a ramp to the high ones."""
    dim, scaling = int(shape.head_dim * shape.rotary_fraction), shape.rope_scaling
    frequencies = 1.0 / shape.rope_theta ** (
        torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    )
    ramp = {"llama3": _llama3_ramp, "yarn": _yarn_ramp}[scaling["rope_type"]](shape, frequencies)
    return ramp * frequencies + (1 - ramp) * frequencies / float(scaling["factor"])


def _llama3_ramp(shape: ModelShape, frequencies: Tensor) -> Tensor:
    """Returns the unscaled share of each frequency, linear in its number of turns over the original context."""
    scaling = shape.rope_scaling
    turns = float(scaling["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    return ((turns - low) / (high - low)).clamp(0, 1)


def _yarn_ramp(shape: ModelShape, frequencies: Tensor) -> Tensor:
    """Returns the unscaled share of each frequency, linear in its index."""
    scaling, count = shape.rope_scaling, frequencies.numel()
    context = float(scaling["original_max_position_embeddings"])
    (
        low,
        high,
    ) = (  # indices of the frequencies with beta_fast and beta_slow turns over the original context
        count * math.log(context / (scaling[beta] * 2 * math.pi)) / math.log(shape.rope_theta)
        for beta in ("beta_fast", "beta_slow")
    )
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    indices = torch.arange(count, dtype=torch.float32, device="cpu")
    return 1 - ((indices - low) / max(high - low, 0.001)).clamp(0, 1)


def yarn_factor(shape: ModelShape) -> float:
    """Returns YaRN's factor on cosine and sine, or 1 without YaRN."""
    if shape.rope_scaling.get("rope_type") != "yarn":
        return 1.0
    return 0.1 * math.log(max(1.0, float(shape.rope_scaling["factor"]))) + 1.0


def rotate_by_position(model: Any) -> None:
    """Makes a GPTModel rotate each packed token by its `position_ids`, not by its place in a row."""
    rotary = model.rotary_pos_emb
    table, positions = rotary.forward, []
    rotary.forward = lambda *args, **kwargs: table(*args, **kwargs)[positions[-1]]
    model.register_forward_pre_hook(
        lambda _model, _args, kwargs: positions.__setitem__(
            slice(None), [kwargs["position_ids"][0]]
        ),
        with_kwargs=True,
    )
