"""The engine's side of every family: where a rank of vLLM 0.32 keeps each HF tensor, in the language of mapping.py.

vLLM calls and cuts things alike for all families, so one table, read from the shape, serves them all. Its loaders,
driven once at start, must agree (`disagreement`); then a plan needs no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megarl.layout import Layout, Parallel
from megarl.models import blocks, gpt_oss, mixtral
from megarl.models.shape import ModelShape
from megarl.models.shards import (
    InterleavedGateUp,
    Replicated,
    Rule,
    ShardDim0,
    ShardDim1,
    ShardSlice,
    Stack,
    Table,
    Transposed,
    by_pairs,
    slices_of,
)

__all__ = ["disagreement", "engine_layout", "engine_slices", "engine_table"]

VOCAB_MULTIPLE = 64  # vLLM pads the vocabulary to it, whatever the number of ranks
HF, LOCAL = blocks.HF, "model.layers.{layer}."


def engine_layout(*, tensor: int, expert: int = 1, rank: int = 0) -> Layout:
    """A rank of one replica. `expert` > 1: vLLM's expert parallelism over all ranks of the replica, data x tensor."""
    sizes = Parallel(tensor=tensor, expert=expert, expert_tensor=1 if expert > 1 else tensor)
    return Layout.of(sizes, max(tensor, expert), rank)


def engine_slices(shape: ModelShape, layout: Layout) -> list[ShardSlice]:
    """What this rank of a replica keeps of each HF tensor."""
    return slices_of(engine_table(shape), shape, layout)


def engine_table(shape: ModelShape) -> Table:
    is_gpt_oss = shape.family == "gpt_oss"
    vocab = (shape.vocab, shape.hidden)
    padded = -(-shape.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    name = "model.embedding.weight" if is_gpt_oss else "model.embed_tokens.weight"
    attention = _latent_attention(shape) if shape.latent else _attention(shape)
    head: tuple[Rule, ...] = (Replicated("model.norm.weight", "model.norm.weight", (shape.hidden,)),)
    if not shape.tied:
        head = (*head, ShardDim0("lm_head.weight", "lm_head.weight", vocab, padded))
    common = (_same("input_layernorm.weight", shape.hidden), _same("post_attention_layernorm.weight", shape.hidden))
    dense = (*common, *attention, *_gated(shape, "mlp.", shape.intermediate))
    return Table(
        embedding=(ShardDim0("model.embed_tokens.weight", name, vocab, padded),),
        dense=dense,
        layer=(*common, *attention, *_routing(shape)) if shape.is_moe else dense,
        expert=_experts(shape) if shape.is_moe else (),
        head=head,
    )


def _same(name: str, *size: int) -> Replicated:
    return Replicated(HF + name, LOCAL + name, size)


def _attention(shape: ModelShape) -> tuple[Rule, ...]:
    hf = HF + "self_attn."
    at = LOCAL + ("attn." if shape.family == "gpt_oss" else "self_attn.")
    rows = tuple(heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads))

    def qkv(kind: str, rest: tuple[int, ...]) -> Stack:
        names = tuple(f"{hf}{part}_proj.{kind}" for part in "qkv")
        return Stack(names, f"{at}qkv_proj.{kind}", rows, rest, (0, shape.kv_heads, shape.kv_heads))

    rules: list[Rule] = [qkv("weight", (shape.hidden,))]
    if shape.qkv_bias:
        rules.append(qkv("bias", ()))
    if shape.qk_norm:
        rules += [Replicated(f"{hf}{part}_norm.weight", f"{at}{part}_norm.weight", (shape.head_dim,)) for part in "qk"]
    rules.append(ShardDim1(hf + "o_proj.weight", at + "o_proj.weight", (shape.hidden, shape.heads * shape.head_dim)))
    if shape.out_bias:
        rules.append(Replicated(hf + "o_proj.bias", at + "o_proj.bias", (shape.hidden,)))
    if shape.sinks:
        rules.append(ShardDim0(hf + "sinks", at + "sinks", (shape.heads,)))
    return tuple(rules)


def _latent_attention(shape: ModelShape) -> tuple[Rule, ...]:
    latent = shape.latent
    assert latent is not None
    hf, at, hidden = HF + "self_attn.", LOCAL + "self_attn.", shape.hidden
    queries, narrow = shape.heads * shape.head_dim, latent.kv_rank + latent.rope
    kv = _same("self_attn.kv_a_proj_with_mqa.weight", narrow, hidden)
    rules: tuple[Rule, ...] = (ShardDim0(hf + "q_proj.weight", at + "q_proj.weight", (queries, hidden)), kv)
    if latent.q_rank:
        names = (hf + "q_a_proj.weight", kv.hf)
        rules = (
            Stack(names, at + "fused_qkv_a_proj.weight", (latent.q_rank, narrow), (hidden,), (1, 1)),
            _same("self_attn.q_a_layernorm.weight", latent.q_rank),
            ShardDim0(hf + "q_b_proj.weight", at + "q_b_proj.weight", (queries, latent.q_rank)),
        )
    up = (shape.heads * (latent.nope + latent.value), latent.kv_rank)
    return (
        *rules,
        _same("self_attn.kv_a_layernorm.weight", latent.kv_rank),
        ShardDim0(hf + "kv_b_proj.weight", at + "kv_b_proj.weight", up),
        ShardDim1(hf + "o_proj.weight", at + "o_proj.weight", (hidden, shape.heads * latent.value)),
    )


def _gated(shape: ModelShape, block: str, width: int) -> tuple[Rule, ...]:
    names = (f"{HF}{block}gate_proj.weight", f"{HF}{block}up_proj.weight")
    down = block + "down_proj.weight"
    return (
        Stack(names, f"{LOCAL}{block}gate_up_proj.weight", (width, width), (shape.hidden,)),
        ShardDim1(HF + down, LOCAL + down, (shape.hidden, width)),
    )


def _names(shape: ModelShape) -> blocks.ExpertNames:
    own = {"mixtral": mixtral.NAMES, "gpt_oss": gpt_oss.NAMES}
    return own.get(shape.family, blocks.ExpertNames())


def _routing(shape: ModelShape) -> tuple[Rule, ...]:
    names = _names(shape)
    router = f"{names.block}{names.router}."
    rules: list[Rule] = [_same(router + "weight", shape.experts, shape.hidden)]
    if shape.router.biased:
        rules.append(_same(router + "bias", shape.experts))
    if shape.router.corrected:
        rules.append(_same(router + "e_score_correction_bias", shape.experts))
    if shape.shared_intermediate:
        rules += _gated(shape, "mlp.shared_experts.", shape.shared_intermediate)
    return tuple(rules)


def _experts(shape: ModelShape) -> tuple[Rule, ...]:
    """All experts of a rank in one parameter each way."""
    names, width, hidden = _names(shape), shape.moe_intermediate, shape.hidden
    into = f"{LOCAL}{names.block}experts.routed_experts."
    hf = f"{HF}{names.block}experts."
    if shape.family == "gpt_oss":
        return (
            InterleavedGateUp(hf + "gate_up_proj", into + "w13_weight", hidden, width, alternating=True),
            InterleavedGateUp(hf + "gate_up_proj_bias", into + "w13_bias", 0, width, alternating=True),
            Transposed(hf + "down_proj", into + "w2_weight", width, hidden),
            Replicated(hf + "down_proj_bias", into + "w2_bias", (hidden,), is_first_only=True),  # zeros on the others
        )
    gate_up = tuple(f"{hf}{{expert}}.{part}.weight" for part in (names.gate, names.up))
    return (
        Stack(gate_up, into + "w13_weight", (width, width), (hidden,)),
        ShardDim1(f"{hf}{{expert}}.{names.down}.weight", into + "w2_weight", (hidden, width)),
    )


def disagreement(table: Iterable[ShardSlice], recorded: Iterable[ShardSlice]) -> str | None:
    """What the engine's loaders did other than the table says, naming the first tensor; None when they agree."""
    expected = {_normal(box) for box in table}
    found = {_normal(part) for box in recorded if box.numel for part in _by_expert(box)}  # or padding only
    for box in sorted(found ^ expected, key=str):
        who, other = ("loaders put", "table does not") if box in found else ("table puts", "loaders do not")
        end = tuple(start + size for start, size in zip(box.start, box.shape, strict=True))
        return f"the engine's {who} {box.name} {box.start} to {end} at element {box.offset} of {box.param}, the {other}"
    return None


def _by_expert(box: ShardSlice) -> Iterator[ShardSlice]:
    """gpt-oss's experts are one tensor, which its loader copies at once."""
    count = box.shape[0] if ".mlp.experts.gate_up" in box.name or ".mlp.experts.down_proj" in box.name else 1
    if "_proj." in box.name or count == 1:
        yield box
        return
    for at in range(count):
        start, shape = (box.start[0] + at, *box.start[1:]), (1, *box.shape[1:])
        yield replace(box, start=start, shape=shape, offset=box.offset + at * box.strides[0])


def _normal(box: ShardSlice) -> ShardSlice:
    """Strides of dims of one element say nothing; tensors of pairs are seen as pairs."""
    if box.name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")) and box.shape[-1:] != (2,):
        box = by_pairs(box)
    return replace(box, strides=tuple(0 if n == 1 else s for n, s in zip(box.shape, box.strides, strict=True)))
