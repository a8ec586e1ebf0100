"""Rotary frequencies for contexts longer than in pre-training: Llama 3's, YaRN (arXiv 2309.00071).

Megatron-Core implements YaRN only for latent attention. Elsewhere, these replace its frequencies.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megarl.models.shape import ModelShape


def scaled_frequencies(shape: ModelShape) -> Tensor:
    """Returns [rotary dim / 2] fp32 frequencies.

    Low ones are divided by `factor`, with a ramp to the high ones.
    """
    dim = int(shape.head_dim * shape.rotary_fraction)
    scaling = shape.rope_scaling
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    frequencies = 1.0 / shape.rope_theta**exponents
    ramps = {"llama3": _llama3_ramp, "yarn": _yarn_ramp}
    ramp = ramps[scaling["rope_type"]](shape, frequencies)
    return ramp * frequencies + (1 - ramp) * frequencies / float(scaling["factor"])


def _llama3_ramp(shape: ModelShape, frequencies: Tensor) -> Tensor:
    """Returns the unscaled share of each frequency, linear in its turns over that context."""
    scaling = shape.rope_scaling
    turns = float(scaling["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    low = float(scaling["low_freq_factor"])
    return ((turns - low) / (float(scaling["high_freq_factor"]) - low)).clamp(0, 1)


def _yarn_ramp(shape: ModelShape, frequencies: Tensor) -> Tensor:
    """Returns the unscaled share of each frequency, linear in its index."""
    scaling = shape.rope_scaling
    count = frequencies.numel()
    context = float(scaling["original_max_position_embeddings"])

    def index(turns: float) -> float:
        """Returns the index of the frequency with that many turns over the original context."""
        return count * math.log(context / (turns * 2 * math.pi)) / math.log(shape.rope_theta)

    low = index(scaling["beta_fast"])
    high = index(scaling["beta_slow"])
    if scaling["truncate"]:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, 2 * count - 1)
    indices = torch.arange(count, dtype=torch.float32, device="cpu")
    return 1 - ((indices - low) / max(high - low, 0.001)).clamp(0, 1)


def yarn_factor(shape: ModelShape) -> float:
    """Returns YaRN's factor on cosine and sine, or 1 without YaRN."""
    if shape.rope_scaling.get("rope_type") != "yarn":
        return 1.0
    return 0.1 * math.log(max(1.0, float(shape.rope_scaling["factor"]))) + 1.0


def rotate_by_position(model: Any) -> None:
    """Makes a GPTModel rotate packed tokens by `position_ids`, not by their place in a row."""
    rotary = model.rotary_pos_emb
    table = rotary.forward

    def keep_positions(
        _model: Any,
        _args: Any,
        kwargs: dict[str, Any],
    ) -> None:
        rotary.positions = kwargs["position_ids"][0]

    rotary.forward = lambda *args, **kwargs: table(*args, **kwargs)[rotary.positions]
    model.register_forward_pre_hook(keep_positions, with_kwargs=True)
