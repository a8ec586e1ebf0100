"""Llama 2 and 3, Qwen2 and 2.5, Qwen3: one table. Bias and query-key norms are read from the shape."""

from __future__ import annotations

from megarl.config.model import ModelShape
from megarl.weights.mapping import Style, Table
from megarl.weights.models import blocks

__all__ = ["table"]


def table(shape: ModelShape, style: Style, padded_vocab: int) -> Table:
    return Table(
        embedding=blocks.embedding(shape, padded_vocab),
        layer=(*blocks.attention(shape, style), *blocks.dense_mlp(shape, style)),
        head=blocks.head(shape, padded_vocab),
        tied=blocks.tied_head(shape, padded_vocab),
    )
