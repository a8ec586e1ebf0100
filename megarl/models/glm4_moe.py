"""GLM-4.5: grouped-query attention with biases, else as DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace

from megarl.models import blocks, deepseek_v3
from megarl.models.shape import ModelShape
from megarl.models.shards import Style, Table

__all__ = ["table"]


def table(shape: ModelShape, style: Style, padded_vocab: int) -> Table:
    attention = blocks.attention(shape, style)
    return replace(
        deepseek_v3.table(shape, style, padded_vocab),
        dense=(*attention, *blocks.dense_mlp(shape, style)),
        layer=(*attention, *blocks.expert_mlp(shape)),
    )
