"""Qwen3-MoE: Qwen3's attention, every layer a softmax-routed layer of experts."""

from __future__ import annotations

from megarl.models import blocks
from megarl.models.shape import ModelShape
from megarl.models.shards import Style, Table

__all__ = ["table"]


def table(shape: ModelShape, style: Style, padded_vocab: int) -> Table:
    return Table(
        embedding=blocks.embedding(shape, padded_vocab),
        layer=(*blocks.attention(shape, style), *blocks.expert_mlp(shape)),
        expert=blocks.experts(shape, style),
        head=blocks.head(shape, padded_vocab),
        tied=blocks.tied_head(shape, padded_vocab),
    )
