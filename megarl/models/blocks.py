"""Rules that families share: embedding and head, attention, dense and expert feed-forward layers.

In Transformer Engine's layer spec a norm is fused into the linear layer that follows it, and
experts are grouped."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megarl.models.shape import DENSE, EXPERTS, ModelShape, Shape
from megarl.models.shards import (
    HF,
    MC,
    LayerSpec,
    Qkv,
    Replicated,
    Rule,
    Rules,
    ShardDim0,
    ShardDim1,
    Stack,
    Table,
)


@dataclass(frozen=True)
class ExpertNames:
    """Checkpoint names of the modules of an MoE layer, after `model.layers.{layer}.`"""

    block: str = "mlp."
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def dense_table(shape: ModelShape, spec: LayerSpec, padded_vocab: int) -> Table:
    rules = (*attention(shape, spec), *dense_mlp(shape, spec))
    return decoder_table(shape, padded_vocab, layers={DENSE: rules})


def moe_table(
    shape: ModelShape,
    spec: LayerSpec,
    padded_vocab: int,
    names: ExpertNames = ExpertNames(),
) -> Table:
    rules = (*attention(shape, spec), *expert_mlp(shape, names), *experts(shape, spec, names))
    return decoder_table(shape, padded_vocab, layers={EXPERTS: rules})


def decoder_table(shape: ModelShape, padded_vocab: int, **groups: Any) -> Table:
    """Returns a Table with embedding, last norm and head. `groups`: the other fields of Table."""
    embedding = ShardDim0(
        "model.embed_tokens.weight",
        "embedding.word_embeddings.weight",
        (shape.vocab, shape.hidden),
        padded_vocab,
    )
    norm = Replicated("model.norm.weight", "decoder.final_layernorm.weight", (shape.hidden,))
    output = replace(embedding, param="output_layer.weight")
    if shape.tied:  # Megatron keeps a copy of the embedding on the last stage, as its output layer
        return Table(embedding=(embedding,), head=(norm,), tied=(output,), **groups)
    head = replace(output, hf="lm_head.weight")
    return Table(embedding=(embedding,), head=(norm, head), **groups)


def attention(shape: ModelShape, spec: LayerSpec) -> Iterator[Rule]:
    """Yields the rules of grouped-query attention and the norm before it."""
    hf = f"{HF}self_attn."
    mc = f"{MC}self_attention."

    def qkv(kind: str, rest: Shape) -> Qkv:
        names = (f"{hf}q_proj.{kind}", f"{hf}k_proj.{kind}", f"{hf}v_proj.{kind}")
        param = f"{mc}linear_qkv.{kind}"
        return Qkv(names, param, shape.heads, shape.kv_heads, shape.head_dim, rest)

    norm = f"{mc}linear_qkv.layer_norm_weight" if spec == "te" else f"{MC}input_layernorm.weight"
    yield Replicated(f"{HF}input_layernorm.weight", norm, (shape.hidden,))
    yield qkv("weight", (shape.hidden,))
    if shape.qkv_bias:
        yield qkv("bias", ())
    if shape.qk_norm:
        size = (shape.head_dim,)
        yield Replicated(f"{hf}q_norm.weight", f"{mc}q_layernorm.weight", size)
        yield Replicated(f"{hf}k_norm.weight", f"{mc}k_layernorm.weight", size)
    size = (shape.hidden, shape.heads * shape.head_dim)
    yield ShardDim1(f"{hf}o_proj.weight", f"{mc}linear_proj.weight", size)
    if shape.out_bias:
        yield Replicated(f"{hf}o_proj.bias", f"{mc}linear_proj.bias", (shape.hidden,))
    if shape.sinks:
        yield ShardDim0(f"{hf}sinks", f"{mc}core_attention.softmax_offset", (shape.heads,))


def dense_mlp(shape: ModelShape, spec: LayerSpec) -> Rules:
    """Returns the rules of a SwiGLU layer and the norm before it."""
    norm = "mlp.linear_fc1.layer_norm_weight" if spec == "te" else "pre_mlp_layernorm.weight"
    return (
        Replicated(f"{HF}post_attention_layernorm.weight", MC + norm, (shape.hidden,)),
        *_swiglu(shape.hidden, shape.intermediate, f"{HF}mlp.", MC + "mlp.{linear}.weight"),
    )


def expert_mlp(shape: ModelShape, names: ExpertNames = ExpertNames()) -> Iterator[Rule]:
    """Yields the rules of an expert layer's norm, router and shared experts."""
    hf = f"{HF}{names.block}{names.router}."
    mc = f"{MC}mlp.router."
    norm = f"{HF}post_attention_layernorm.weight"
    per_expert = (shape.experts,)
    yield Replicated(norm, f"{MC}pre_mlp_layernorm.weight", (shape.hidden,))
    yield Replicated(f"{hf}weight", f"{mc}weight", (shape.experts, shape.hidden))
    if shape.router.linear_bias:
        yield Replicated(f"{hf}bias", f"{mc}bias", per_expert)
    if shape.router.expert_bias:
        yield Replicated(f"{hf}e_score_correction_bias", f"{mc}expert_bias", per_expert)
    if shape.shared_intermediate:
        hf = f"{HF}{names.block}shared_experts."
        mc = MC + "mlp.shared_experts.{linear}.weight"
        yield from _swiglu(shape.hidden, shape.shared_intermediate, hf, mc)


def experts(shape: ModelShape, spec: LayerSpec, names: ExpertNames = ExpertNames()) -> Rules:
    hf = f"{HF}{names.block}experts.{{expert}}."
    mc = expert_param(spec, "{linear}", "weight")
    return _swiglu(shape.hidden, shape.moe_intermediate, hf, mc, names)


def expert_param(spec: LayerSpec, linear: str, kind: str) -> str:
    if spec == "local":
        return f"{MC}mlp.experts.local_experts.{{expert}}.{linear}.{kind}"
    return f"{MC}mlp.experts.{linear}.{kind}{{expert}}"


def _swiglu(
    hidden: int,
    width: int,
    hf: str,
    mc: str,
    names: ExpertNames = ExpertNames(),
) -> Rules:
    """Returns the rules of gate, up and down. `hf` is the prefix of the names in `names`; `mc` has
    `{linear}` in place of Megatron's linear layer."""
    gate_up = (f"{hf}{names.gate}.weight", f"{hf}{names.up}.weight")
    down = f"{hf}{names.down}.weight"
    return (
        Stack(gate_up, mc.replace("{linear}", "linear_fc1"), (width, width), (hidden,)),
        ShardDim1(down, mc.replace("{linear}", "linear_fc2"), (hidden, width)),
    )
