"""Rules that families share: embedding and head, attention, dense and expert feed-forward layers.

In Transformer Engine's layer spec a norm is fused into the linear layer that follows it, and experts are grouped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megarl.models.shape import ModelShape
from megarl.models.shards import (
    HF,
    MC,
    LayerSpec,
    Qkv,
    Replicated,
    Rule,
    ShardDim0,
    ShardDim1,
    Stack,
    Table,
)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Checkpoint names of the modules of an MoE layer, after `model.layers.{layer}.`"""

    block: str = "mlp."
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def dense_table(shape: ModelShape, spec: LayerSpec, padded_vocab: int) -> Table:
    return decoder_table(
        shape, padded_vocab, layer=(*attention(shape, spec), *dense_mlp(shape, spec))
    )


def moe_table(
    shape: ModelShape, spec: LayerSpec, padded_vocab: int, names: ExpertNames = ExpertNames()
) -> Table:
    layer = (*attention(shape, spec), *expert_mlp(shape, names))
    return decoder_table(shape, padded_vocab, layer=layer, expert=experts(shape, spec, names))


def decoder_table(shape: ModelShape, padded_vocab: int, **groups: Any) -> Table:
    """Returns a Table of `groups`, with the embedding, the last norm and the head."""
    size = (shape.vocab, shape.hidden)
    embedding = ShardDim0(
        "model.embed_tokens.weight", "embedding.word_embeddings.weight", size, padded_vocab
    )
    norm = Replicated("model.norm.weight", "decoder.final_layernorm.weight", (shape.hidden,))
    if shape.tied:  # Megatron keeps a copy of the embedding on the last stage, as its output layer
        copy = ShardDim0(embedding.hf, "output_layer.weight", size, padded_vocab)
        return Table(embedding=(embedding,), head=(norm,), tied=(copy,), **groups)
    head = ShardDim0("lm_head.weight", "output_layer.weight", size, padded_vocab)
    return Table(embedding=(embedding,), head=(norm, head), **groups)


def attention(shape: ModelShape, spec: LayerSpec) -> Iterator[Rule]:
    """Yields the rules of grouped-query attention and the norm before it."""
    hf, mc = HF + "self_attn.", MC + "self_attention."

    def qkv(kind: str, rest: tuple[int, ...]) -> Qkv:
        q, k, v = (f"{hf}{part}_proj.{kind}" for part in "qkv")
        return Qkv(
            (q, k, v), mc + "linear_qkv." + kind, shape.heads, shape.kv_heads, shape.head_dim, rest
        )

    norm = (
        "self_attention.linear_qkv.layer_norm_weight" if spec == "te" else "input_layernorm.weight"
    )
    yield Replicated(HF + "input_layernorm.weight", MC + norm, (shape.hidden,))
    yield qkv("weight", (shape.hidden,))
    if shape.qkv_bias:
        yield qkv("bias", ())
    for x in "qk" if shape.qk_norm else "":
        yield Replicated(f"{hf}{x}_norm.weight", f"{mc}{x}_layernorm.weight", (shape.head_dim,))
    yield ShardDim1(
        hf + "o_proj.weight",
        mc + "linear_proj.weight",
        (shape.hidden, shape.heads * shape.head_dim),
    )
    if shape.out_bias:
        yield Replicated(hf + "o_proj.bias", mc + "linear_proj.bias", (shape.hidden,))
    if shape.sinks:
        yield ShardDim0(hf + "sinks", mc + "core_attention.softmax_offset", (shape.heads,))


def dense_mlp(shape: ModelShape, spec: LayerSpec) -> tuple[Rule, ...]:
    """Returns the rules of a SwiGLU layer and the norm before it."""
    norm = "mlp.linear_fc1.layer_norm_weight" if spec == "te" else "pre_mlp_layernorm.weight"
    return (
        Replicated(HF + "post_attention_layernorm.weight", MC + norm, (shape.hidden,)),
        *_swiglu(shape.hidden, shape.intermediate, HF + "mlp.", MC + "mlp.{linear}.weight"),
    )


def expert_mlp(shape: ModelShape, names: ExpertNames = ExpertNames()) -> Iterator[Rule]:
    """Yields the rules of an expert layer's norm, router and shared experts."""
    mc, router = MC + "mlp.", f"{HF}{names.block}{names.router}."
    yield Replicated(
        HF + "post_attention_layernorm.weight", MC + "pre_mlp_layernorm.weight", (shape.hidden,)
    )
    yield Replicated(router + "weight", mc + "router.weight", (shape.experts, shape.hidden))
    if shape.router.linear_bias:
        yield Replicated(router + "bias", mc + "router.bias", (shape.experts,))
    if shape.router.expert_bias:
        yield Replicated(
            router + "e_score_correction_bias", mc + "router.expert_bias", (shape.experts,)
        )
    if width := shape.shared_intermediate:
        hf, shared = f"{HF}{names.block}shared_experts.", mc + "shared_experts.{linear}.weight"
        yield from _swiglu(shape.hidden, width, hf, shared)


def experts(
    shape: ModelShape, spec: LayerSpec, names: ExpertNames = ExpertNames()
) -> tuple[Rule, ...]:
    param = expert_param(spec, "{linear}", "weight")
    return _swiglu(
        shape.hidden, shape.moe_intermediate, f"{HF}{names.block}experts.{{expert}}.", param, names
    )


def expert_param(spec: LayerSpec, linear: str, kind: str) -> str:
    if spec == "local":
        return f"{MC}mlp.experts.local_experts.{{expert}}.{linear}.{kind}"
    return f"{MC}mlp.experts.{linear}.{kind}{{expert}}"


def _swiglu(
    hidden: int, width: int, hf: str, mc: str, names: ExpertNames = ExpertNames()
) -> tuple[Rule, ...]:
    """`hf` is the prefix of the names in `names`; `mc` has `{linear}` in place of Megatron's linear layer."""
    gate_up = (f"{hf}{names.gate}.weight", f"{hf}{names.up}.weight")
    return (
        Stack(gate_up, mc.replace("{linear}", "linear_fc1"), (width, width), (hidden,)),
        ShardDim1(
            f"{hf}{names.down}.weight", mc.replace("{linear}", "linear_fc2"), (hidden, width)
        ),
    )
