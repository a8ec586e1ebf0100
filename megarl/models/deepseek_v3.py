"""DeepSeek-V3, Kimi-K2: latent attention, leading dense layers, shared experts, a router corrected by an fp32 bias."""

from __future__ import annotations

from megarl.models import blocks
from megarl.models.shape import ModelShape
from megarl.models.shards import Style, Table

__all__ = ["table"]


def table(shape: ModelShape, style: Style, padded_vocab: int) -> Table:
    attention = blocks.latent_attention(shape, style)
    return Table(
        embedding=blocks.embedding(shape, padded_vocab),
        dense=(*attention, *blocks.dense_mlp(shape, style)),
        layer=(*attention, *blocks.expert_mlp(shape)),
        expert=blocks.experts(shape, style),
        head=blocks.head(shape, padded_vocab),
        tied=blocks.tied_head(shape, padded_vocab),
        mtp=blocks.prediction(shape, padded_vocab),
        fp32=frozenset({blocks.HF + "mlp.gate.e_score_correction_bias"}),
    )
