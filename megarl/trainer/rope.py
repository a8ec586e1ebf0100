"""Frequencies of rotary positions that were stretched after pre-training: llama3's rule and yarn's (arXiv 2309.00071).

Megatron-Core knows yarn for latent attention; elsewhere these replace the frequencies that it made.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.models.shape import ModelShape

__all__ = ["scaled_frequencies", "yarn_factor"]


def scaled_frequencies(shape: ModelShape) -> Tensor:
    """[rotary dim / 2] fp32."""
    dim = int(shape.head_dim * shape.rotary_fraction)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    kept = 1.0 / shape.rope_theta**exponents
    return {"llama3": _llama3, "yarn": _yarn}[shape.rope_scaling["rope_type"]](shape, kept)


def _llama3(shape: ModelShape, kept: Tensor) -> Tensor:
    """Long wavelengths divided by `factor`, short ones kept, a ramp between."""
    scaling = shape.rope_scaling
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(scaling["original_max_position_embeddings"])
    ramp = ((context * kept / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return ramp * kept + (1 - ramp) * kept / factor


def _yarn(shape: ModelShape, kept: Tensor) -> Tensor:
    """The same, with a ramp that is linear in the index of the frequency."""
    scaling, count = shape.rope_scaling, kept.numel()
    context = float(scaling["original_max_position_embeddings"])

    def index(turns: float) -> float:
        """Of the frequency that turns so often over the original context."""
        return count * math.log(context / (turns * 2 * math.pi)) / math.log(shape.rope_theta)

    low, high = index(scaling["beta_fast"]), index(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    ramp = ((torch.arange(count, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)).clamp(0, 1)
    return (1 - ramp) * kept + ramp * kept / float(scaling["factor"])


def yarn_factor(shape: ModelShape) -> float:
    """What yarn multiplies cosine and sine with; 1 without it."""
    if shape.rope_scaling.get("rope_type") != "yarn":
        return 1.0
    return 0.1 * math.log(max(1.0, float(shape.rope_scaling["factor"]))) + 1.0
