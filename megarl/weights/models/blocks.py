"""The rows that families share: embeddings and head, attention, dense and expert feed-forward.

Under Transformer Engine's spec a norm is fused into the linear that follows it, and experts are grouped.
"""

from __future__ import annotations

from megarl.config.model import ModelShape
from megarl.weights.mapping import Cols, Fused, Qkv, Rows, Rule, Style, Whole

__all__ = ["attention", "dense_mlp", "embedding", "expert_mlp", "experts", "head", "tied_head"]

HF, MC = "model.layers.{layer}.", "decoder.layers.{layer}."


def embedding(shape: ModelShape, padded_vocab: int) -> tuple[Rule, ...]:
    size = (shape.vocab, shape.hidden)
    return (Rows("model.embed_tokens.weight", "embedding.word_embeddings.weight", size, padded_vocab),)


def head(shape: ModelShape, padded_vocab: int) -> tuple[Rule, ...]:
    norm = Whole("model.norm.weight", "decoder.final_layernorm.weight", (shape.hidden,))
    if shape.tied:
        return (norm,)
    return (norm, Rows("lm_head.weight", "output_layer.weight", (shape.vocab, shape.hidden), padded_vocab))


def tied_head(shape: ModelShape, padded_vocab: int) -> tuple[Rule, ...]:
    """Megatron keeps a copy of a tied embedding on the last stage, as its output layer."""
    if not shape.tied:
        return ()
    return (Rows("model.embed_tokens.weight", "output_layer.weight", (shape.vocab, shape.hidden), padded_vocab),)


def attention(shape: ModelShape, style: Style) -> tuple[Rule, ...]:
    hf, mc = HF + "self_attn.", MC + "self_attention."
    names = (hf + "q_proj.{kind}", hf + "k_proj.{kind}", hf + "v_proj.{kind}")

    def qkv(kind: str, rest: tuple[int, ...]) -> Qkv:
        q, k, v = (name.replace("{kind}", kind) for name in names)
        return Qkv((q, k, v), mc + "linear_qkv." + kind, shape.heads, shape.kv_heads, shape.head_dim, rest)

    norm = "self_attention.linear_qkv.layer_norm_weight" if style == "te" else "input_layernorm.weight"
    rules: list[Rule] = [Whole(HF + "input_layernorm.weight", MC + norm, (shape.hidden,))]
    rules.append(qkv("weight", (shape.hidden,)))
    if shape.qkv_bias:
        rules.append(qkv("bias", ()))
    if shape.qk_norm:
        rules.append(Whole(hf + "q_norm.weight", mc + "q_layernorm.weight", (shape.head_dim,)))
        rules.append(Whole(hf + "k_norm.weight", mc + "k_layernorm.weight", (shape.head_dim,)))
    rules.append(Cols(hf + "o_proj.weight", mc + "linear_proj.weight", (shape.hidden, shape.heads * shape.head_dim)))
    return tuple(rules)


def dense_mlp(shape: ModelShape, style: Style) -> tuple[Rule, ...]:
    norm = "mlp.linear_fc1.layer_norm_weight" if style == "te" else "pre_mlp_layernorm.weight"
    gate_up = (HF + "mlp.gate_proj.weight", HF + "mlp.up_proj.weight")
    return (
        Whole(HF + "post_attention_layernorm.weight", MC + norm, (shape.hidden,)),
        Fused(gate_up, MC + "mlp.linear_fc1.weight", (shape.intermediate, shape.hidden)),
        Cols(HF + "mlp.down_proj.weight", MC + "mlp.linear_fc2.weight", (shape.hidden, shape.intermediate)),
    )


def expert_mlp(shape: ModelShape) -> tuple[Rule, ...]:
    """What a layer of experts holds once: its norm and its router."""
    return (
        Whole(HF + "post_attention_layernorm.weight", MC + "pre_mlp_layernorm.weight", (shape.hidden,)),
        Whole(HF + "mlp.gate.weight", MC + "mlp.router.weight", (shape.experts, shape.hidden)),
    )


def experts(shape: ModelShape, style: Style) -> tuple[Rule, ...]:
    hf, mc = HF + "mlp.experts.{expert}.", MC + "mlp.experts."
    fc1, fc2 = ("linear_fc1.weight{expert}", "linear_fc2.weight{expert}")
    if style == "local":
        fc1, fc2 = ("local_experts.{expert}.linear_fc1.weight", "local_experts.{expert}.linear_fc2.weight")
    gate_up = (hf + "gate_proj.weight", hf + "up_proj.weight")
    return (
        Fused(gate_up, mc + fc1, (shape.moe_intermediate, shape.hidden)),
        Cols(hf + "down_proj.weight", mc + fc2, (shape.hidden, shape.moe_intermediate)),
    )
