"""Rotary frequencies that were stretched after pre-training: Llama 3's scaling, and YaRN (arXiv 2309.00071).

Megatron-Core implements YaRN for latent attention only; elsewhere these frequencies replace its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.models.shape import ModelShape

__all__ = ["scaled_frequencies", "yarn_factor"]


def scaled_frequencies(shape: ModelShape) -> Tensor:
    """[rotary dim / 2] fp32: high frequencies are kept, low ones divided by `factor`, with a ramp between."""
    dim, scaling = int(shape.head_dim * shape.rotary_fraction), shape.rope_scaling
    frequencies = 1.0 / shape.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    kept = {"llama3": _llama3_kept, "yarn": _yarn_kept}[scaling["rope_type"]](shape, frequencies)
    return kept * frequencies + (1 - kept) * frequencies / float(scaling["factor"])


def _llama3_kept(shape: ModelShape, frequencies: Tensor) -> Tensor:
    """The share of each frequency that is kept: linear in its number of turns over the original context."""
    scaling, context = shape.rope_scaling, float(shape.rope_scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    return ((context * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)


def _yarn_kept(shape: ModelShape, frequencies: Tensor) -> Tensor:
    """The same, linear in the index of the frequency."""
    scaling, count = shape.rope_scaling, frequencies.numel()
    context = float(scaling["original_max_position_embeddings"])

    def index(turns: float) -> float:
        """Of the frequency with this number of turns over the original context."""
        return count * math.log(context / (turns * 2 * math.pi)) / math.log(shape.rope_theta)

    low, high = index(scaling["beta_fast"]), index(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    indices = torch.arange(count, dtype=torch.float32, device="cpu")
    return 1 - ((indices - low) / max(high - low, 0.001)).clamp(0, 1)


def yarn_factor(shape: ModelShape) -> float:
    """YaRN's factor on cosine and sine; 1 without YaRN."""
    if shape.rope_scaling.get("rope_type") != "yarn":
        return 1.0
    return 0.1 * math.log(max(1.0, float(shape.rope_scaling["factor"]))) + 1.0
