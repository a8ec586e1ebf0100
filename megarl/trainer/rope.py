"""Rotary frequencies for contexts longer than in pre-training: Llama 3's, YaRN (arXiv 2309.00071).

Megatron-Core implements YaRN only for latent attention. Elsewhere, the frequencies computed here
replace Megatron's.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megarl.models.shape import ModelShape


def scaled_frequencies(shape: ModelShape) -> Tensor:
    """Returns [rotary dim / 2] fp32 frequencies, computed by transformers."""
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = shape.rope_scaling
    theirs = {"rope_theta": shape.rope_theta, "partial_rotary_factor": shape.rotary_fraction}
    config: Any = {
        "rope_parameters": scaling | theirs,
        "head_dim": shape.head_dim,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.max_position,
    }
    function = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    with torch.device("cpu"):  # a model may be built on the meta device
        return function(PreTrainedConfig(**config))[0]


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
