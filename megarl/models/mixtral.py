"""Mixtral: llama's attention, every layer a softmax-routed layer of experts under names of its own."""

from __future__ import annotations

from megarl.models import blocks
from megarl.models.shape import ModelShape
from megarl.models.shards import Style, Table

__all__ = ["NAMES", "table"]

NAMES = blocks.ExpertNames(block="block_sparse_moe.", gate="w1", up="w3", down="w2")


def table(shape: ModelShape, style: Style, padded_vocab: int) -> Table:
    return Table(
        embedding=blocks.embedding(shape, padded_vocab),
        layer=(*blocks.attention(shape, style), *blocks.expert_mlp(shape, NAMES)),
        expert=blocks.experts(shape, style, NAMES),
        head=blocks.head(shape, padded_vocab),
        tied=blocks.tied_head(shape, padded_vocab),
    )
