"""Qwen3-MoE: Qwen3's attention, every layer a softmax-routed layer of experts."""

from __future__ import annotations

from megarl.config.model import ModelShape
from megarl.weights.mapping import Style, Table
from megarl.weights.models import blocks

__all__ = ["table"]


def table(shape: ModelShape, style: Style, padded_vocab: int) -> Table:
    return Table(
        embedding=blocks.embedding(shape, padded_vocab),
        layer=(*blocks.attention(shape, style), *blocks.expert_mlp(shape)),
        expert=blocks.experts(shape, style),
        head=blocks.head(shape, padded_vocab),
        tied=blocks.tied_head(shape, padded_vocab),
    )
