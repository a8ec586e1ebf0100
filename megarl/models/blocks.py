"""The rows that families share: embeddings and head, attention, dense and expert feed-forward.

Under Transformer Engine's spec a norm is fused into the linear that follows it, and experts are grouped.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.models.shape import Latent, ModelShape
from megarl.models.shards import Qkv, Replicated, Rule, ShardDim0, ShardDim1, Stack, Style

__all__ = [
    "HF", "MC", "ExpertNames", "attention", "dense_mlp", "embedding", "expert_mlp", "expert_param", "experts", "head",
    "latent_attention", "prediction", "tied_head",
]  # fmt: skip

HF, MC = "model.layers.{layer}.", "decoder.layers.{layer}."


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a family's checkpoint calls what a layer of experts holds, after `model.layers.{layer}.`"""

    block: str = "mlp."
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def embedding(shape: ModelShape, padded_vocab: int) -> tuple[Rule, ...]:
    size = (shape.vocab, shape.hidden)
    return (ShardDim0("model.embed_tokens.weight", "embedding.word_embeddings.weight", size, padded_vocab),)


def head(shape: ModelShape, padded_vocab: int) -> tuple[Rule, ...]:
    norm = Replicated("model.norm.weight", "decoder.final_layernorm.weight", (shape.hidden,))
    if shape.tied:
        return (norm,)
    return (norm, ShardDim0("lm_head.weight", "output_layer.weight", (shape.vocab, shape.hidden), padded_vocab))


def tied_head(shape: ModelShape, padded_vocab: int) -> tuple[Rule, ...]:
    """Megatron keeps a copy of a tied embedding on the last stage, as its output layer."""
    if not shape.tied:
        return ()
    return (ShardDim0("model.embed_tokens.weight", "output_layer.weight", (shape.vocab, shape.hidden), padded_vocab),)


def attention(shape: ModelShape, style: Style) -> tuple[Rule, ...]:
    hf, mc = HF + "self_attn.", MC + "self_attention."
    names = (hf + "q_proj.{kind}", hf + "k_proj.{kind}", hf + "v_proj.{kind}")

    def qkv(kind: str, rest: tuple[int, ...]) -> Qkv:
        q, k, v = (name.replace("{kind}", kind) for name in names)
        return Qkv((q, k, v), mc + "linear_qkv." + kind, shape.heads, shape.kv_heads, shape.head_dim, rest)

    norm = "self_attention.linear_qkv.layer_norm_weight" if style == "te" else "input_layernorm.weight"
    rules: list[Rule] = [Replicated(HF + "input_layernorm.weight", MC + norm, (shape.hidden,))]
    rules.append(qkv("weight", (shape.hidden,)))
    if shape.qkv_bias:
        rules.append(qkv("bias", ()))
    if shape.qk_norm:
        rules.append(Replicated(hf + "q_norm.weight", mc + "q_layernorm.weight", (shape.head_dim,)))
        rules.append(Replicated(hf + "k_norm.weight", mc + "k_layernorm.weight", (shape.head_dim,)))
    rules.append(
        ShardDim1(hf + "o_proj.weight", mc + "linear_proj.weight", (shape.hidden, shape.heads * shape.head_dim))
    )
    if shape.out_bias:
        rules.append(Replicated(hf + "o_proj.bias", mc + "linear_proj.bias", (shape.hidden,)))
    if shape.sinks:
        rules.append(ShardDim0(hf + "sinks", mc + "core_attention.softmax_offset", (shape.heads,)))
    return tuple(rules)


def latent_attention(shape: ModelShape, style: Style) -> tuple[Rule, ...]:
    """DeepSeek's. The narrow projections are whole on every rank, in our local layer as under Transformer Engine."""
    hf, mc, at = HF + "self_attn.", MC + "self_attention.", shape.latent or Latent(0, 0, 0, 0, 0)
    te = style == "te"
    rules: list[Rule] = [Replicated(HF + "input_layernorm.weight", MC + "input_layernorm.weight", (shape.hidden,))]
    queries = shape.heads * shape.head_dim
    if at.q_rank:
        norm = "linear_q_up_proj.layer_norm_weight" if te else "q_layernorm.weight"
        rules += [
            Replicated(hf + "q_a_proj.weight", mc + "linear_q_down_proj.weight", (at.q_rank, shape.hidden)),
            Replicated(hf + "q_a_layernorm.weight", mc + norm, (at.q_rank,)),
            ShardDim0(hf + "q_b_proj.weight", mc + "linear_q_up_proj.weight", (queries, at.q_rank)),
        ]
    else:
        rules.append(ShardDim0(hf + "q_proj.weight", mc + "linear_q_proj.weight", (queries, shape.hidden)))
    norm = "linear_kv_up_proj.layer_norm_weight" if te else "kv_layernorm.weight"
    down = (at.kv_rank + at.rope, shape.hidden)
    up = (shape.heads * (at.nope + at.value), at.kv_rank)
    return (
        *rules,
        Replicated(hf + "kv_a_proj_with_mqa.weight", mc + "linear_kv_down_proj.weight", down),
        Replicated(hf + "kv_a_layernorm.weight", mc + norm, (at.kv_rank,)),
        ShardDim0(hf + "kv_b_proj.weight", mc + "linear_kv_up_proj.weight", up),
        ShardDim1(hf + "o_proj.weight", mc + "linear_proj.weight", (shape.hidden, shape.heads * at.value)),
    )


def dense_mlp(shape: ModelShape, style: Style) -> tuple[Rule, ...]:
    norm = "mlp.linear_fc1.layer_norm_weight" if style == "te" else "pre_mlp_layernorm.weight"
    return (
        Replicated(HF + "post_attention_layernorm.weight", MC + norm, (shape.hidden,)),
        *_gated(shape, HF + "mlp.", MC + "mlp.", shape.intermediate),
    )


def expert_mlp(shape: ModelShape, names: ExpertNames = ExpertNames()) -> tuple[Rule, ...]:
    """What a layer of experts holds once: its norm, its router, its shared experts."""
    hf, mc, router = HF + names.block, MC + "mlp.", f"{HF}{names.block}{names.router}."
    rules: list[Rule] = [
        Replicated(HF + "post_attention_layernorm.weight", MC + "pre_mlp_layernorm.weight", (shape.hidden,)),
        Replicated(router + "weight", mc + "router.weight", (shape.experts, shape.hidden)),
    ]
    if shape.router.biased:
        rules.append(Replicated(router + "bias", mc + "router.bias", (shape.experts,)))
    if shape.router.corrected:
        rules.append(Replicated(router + "e_score_correction_bias", mc + "router.expert_bias", (shape.experts,)))
    if shape.shared_intermediate:
        rules += _gated(shape, hf + "shared_experts.", mc + "shared_experts.", shape.shared_intermediate)
    return tuple(rules)


def _gated(shape: ModelShape, hf: str, mc: str, width: int) -> tuple[Rule, ...]:
    gate_up = (hf + "gate_proj.weight", hf + "up_proj.weight")
    return (
        Stack(gate_up, mc + "linear_fc1.weight", (width, width), (shape.hidden,)),
        ShardDim1(hf + "down_proj.weight", mc + "linear_fc2.weight", (shape.hidden, width)),
    )


def expert_param(style: Style, linear: str, kind: str) -> str:
    if style == "local":
        return f"{MC}mlp.experts.local_experts.{{expert}}.{linear}.{kind}"
    return f"{MC}mlp.experts.{linear}.{kind}{{expert}}"


def experts(shape: ModelShape, style: Style, names: ExpertNames = ExpertNames()) -> tuple[Rule, ...]:
    hf, width = HF + names.block + "experts.{expert}.", shape.moe_intermediate
    gate_up = (f"{hf}{names.gate}.weight", f"{hf}{names.up}.weight")
    down = f"{hf}{names.down}.weight"
    return (
        Stack(gate_up, expert_param(style, "linear_fc1", "weight"), (width, width), (shape.hidden,)),
        ShardDim1(down, expert_param(style, "linear_fc2", "weight"), (shape.hidden, width)),
    )


def prediction(shape: ModelShape, padded_vocab: int) -> tuple[Rule, ...]:
    """Multi-token prediction beside its transformer layer. Its embedding and head are the model's own."""
    mtp, one, vocab = "mtp.layers.{layer}.", (shape.hidden,), (shape.vocab, shape.hidden)
    return (
        Replicated(HF + "enorm.weight", mtp + "enorm.weight", one),
        Replicated(HF + "hnorm.weight", mtp + "hnorm.weight", one),
        ShardDim0(HF + "eh_proj.weight", mtp + "eh_proj.weight", (shape.hidden, 2 * shape.hidden)),
        Replicated(HF + "shared_head.norm.weight", mtp + "final_layernorm.weight", one),
        ShardDim0(HF + "embed_tokens.weight", "embedding.word_embeddings.weight", vocab, padded_vocab),
        ShardDim0(HF + "shared_head.head.weight", "output_layer.weight", vocab, padded_vocab),
    )
