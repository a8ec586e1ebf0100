"""Llama 2 and 3, Qwen2 and 2.5, Qwen3: one table. Bias and query-key norms are read from the shape."""

from __future__ import annotations

from megarl.models import blocks
from megarl.models.shape import ModelShape
from megarl.models.shards import Style, Table

__all__ = ["table"]


def table(shape: ModelShape, style: Style, padded_vocab: int) -> Table:
    return Table(
        embedding=blocks.embedding(shape, padded_vocab),
        layer=(*blocks.attention(shape, style), *blocks.dense_mlp(shape, style)),
        head=blocks.head(shape, padded_vocab),
        tied=blocks.tied_head(shape, padded_vocab),
    )
