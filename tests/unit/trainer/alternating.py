"""A family of two kinds of layers in turn, a dense one and one with experts: Qwen3-MoE with `decoder_sparse_step` 2.

Its table also has a kind that no checkpoint has, whose experts are twice as wide.
"""

from __future__ import annotations

from dataclasses import replace

from megarl.models import blocks
from megarl.models.config_json import ConfigReader, read_decoder
from megarl.models.shape import DENSE, EXPERTS, Family, LayerKind, ModelShape, Router
from megarl.models.shards import LayerSpec, Table

__all__ = ["FAMILIES", "WIDE"]

WIDE = LayerKind("wide", has_experts=True)


def read(config: ConfigReader) -> ModelShape:
    config.only(attention_bias=False, decoder_sparse_step=2, mlp_only_layers=[])
    return read_decoder(
        config,
        qk_norm=True,
        experts=config.size("num_experts"),
        experts_per_token=config.size("num_experts_per_tok"),
        moe_intermediate=config.size("moe_intermediate_size"),
        kinds=(DENSE, EXPERTS) * config.size("num_hidden_layers"),
        router=Router(norm_topk_prob=config.flag("norm_topk_prob")),
    )


def table(shape: ModelShape, spec: LayerSpec, padded_vocab: int) -> Table:
    attention = tuple(blocks.attention(shape, spec))
    router = tuple(blocks.expert_mlp(shape))
    wide = replace(shape, moe_intermediate=2 * shape.moe_intermediate)
    layers = {
        DENSE: attention + blocks.dense_mlp(shape, spec),
        EXPERTS: attention + router + blocks.experts(shape, spec),
        WIDE: attention + router + blocks.experts(wide, spec),
    }
    return blocks.decoder_table(shape, padded_vocab, layers=layers)


FAMILIES = {
    "alternating": Family(architecture="Qwen3MoeForCausalLM", read=read, table=table, is_moe=True)
}
