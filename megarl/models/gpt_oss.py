"""gpt-oss in bf16: sinks, biases; a layer's experts are one tensor, input dim first, gate and up alternating."""

from __future__ import annotations

from megarl.models import blocks
from megarl.models.shape import ModelShape
from megarl.models.shards import InterleavedGateUp, Replicated, Rule, Style, Table, Transposed

__all__ = ["NAMES", "table"]

NAMES = blocks.ExpertNames(router="router")


def table(shape: ModelShape, style: Style, padded_vocab: int) -> Table:
    return Table(
        embedding=blocks.embedding(shape, padded_vocab),
        layer=(*blocks.attention(shape, style), *blocks.expert_mlp(shape, NAMES)),
        expert=_experts(shape, style),
        head=blocks.head(shape, padded_vocab),
        tied=blocks.tied_head(shape, padded_vocab),
    )


def _experts(shape: ModelShape, style: Style) -> tuple[Rule, ...]:
    hf, hidden, inner = blocks.HF + "mlp.experts.", shape.hidden, shape.moe_intermediate

    def param(linear: str, kind: str) -> str:
        return blocks.expert_param(style, linear, kind)

    return (
        InterleavedGateUp(hf + "gate_up_proj", param("linear_fc1", "weight"), hidden, inner),
        InterleavedGateUp(hf + "gate_up_proj_bias", param("linear_fc1", "bias"), 0, inner),
        Transposed(hf + "down_proj", param("linear_fc2", "weight"), inner, hidden),
        Replicated(hf + "down_proj_bias", param("linear_fc2", "bias"), (hidden,)),
    )
