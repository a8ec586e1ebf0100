"""The engine's side of every family: where a rank of vLLM 0.32 stores each HF tensor.

vLLM uses Hugging Face's names and Megatron's splits, and fuses some tensors, so its table is derived from Megatron's;
`Family.engine` handles the exceptions. Planning needs no engine; at startup, the trace of vLLM's loaders is checked
against the table (`first_mismatch`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from megarl.layout import Layout, Parallel
from megarl.models.registry import FAMILIES, megatron_table
from megarl.models.shape import ModelShape
from megarl.models.shards import Qkv, Rule, ShardSlice, Stack, Table, as_pairs, slices_of

VOCAB_MULTIPLE = 64  # of vLLM's padded vocabulary, for any number of ranks


def engine_layout(*, tensor: int, expert: int = 1, rank: int = 0) -> Layout:
    """Returns a rank's layout in a replica. `expert` > 1: expert parallelism over all its ranks, data x tensor."""
    sizes = Parallel(tensor=tensor, expert=expert, expert_tensor=1 if expert > 1 else tensor)
    return Layout.of(sizes, max(tensor, expert), rank)


def engine_slices(shape: ModelShape, layout: Layout) -> list[ShardSlice]:
    """Returns where this rank of a replica stores each HF tensor."""
    return slices_of(engine_table(shape), shape, layout)


def engine_table(shape: ModelShape) -> Table:
    """Raises ValueError for a family without a table."""
    padded = -(-shape.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    table = megatron_table(shape, style="local", padded_vocab=padded)
    names = ("embedding", "dense", "layer", "head")
    rules: dict[str, Any] = {name: tuple(map(_derived, getattr(table, name))) for name in names}
    return FAMILIES[shape.family].engine(shape, Table(**rules, expert=tuple(map(_derived_expert, table.expert))))


def _derived(rule: Rule) -> Rule:
    """Returns the rule for the same tensors in vLLM, whose parameter is named after the tensor or tensors it fuses."""
    if isinstance(rule, Qkv):
        rows = tuple(size[0] for size in rule.shapes().values())
        param = rule.hf[0].replace(".q_proj.", ".qkv_proj.")
        return Stack(rule.hf, param, rows, rule.rest, max_shards=(0, rule.kv_heads, rule.kv_heads))
    (name, *fused) = rule.shapes()
    return replace(rule, param=name.replace(".gate_proj.", ".gate_up_proj.") if fused else name)


def _derived_expert(rule: Rule) -> Rule:
    """Returns the rule for the same tensors of all experts of the rank, which vLLM stacks in one parameter."""
    name = next(iter(rule.shapes()))
    weight = "w13" if "linear_fc1" in rule.param else "w2"
    block, kind = name.partition("experts.")[0], rule.param.rpartition(".")[2]
    return replace(rule, param=f"{block}experts.routed_experts.{weight}_{kind}")


def first_mismatch(table: Iterable[ShardSlice], recorded: Iterable[ShardSlice]) -> str | None:
    """Returns an error message for the first tensor that vLLM's loaders place differently from the table, or None."""
    expected = {_without_idle_strides(part) for part in table}
    by_name = {part.name: part for part in expected}
    loaded = {
        _without_idle_strides(part)
        for whole in recorded
        if whole.numel  # not only padding
        for part in _split_like(whole, by_name.get(whole.name, whole))
    }
    for part in sorted(loaded ^ expected, key=str):
        actor, other = ("loaders put", "table does not") if part in loaded else ("table puts", "loaders do not")
        end = tuple(start + size for start, size in zip(part.start, part.shape, strict=True))
        return (
            f"the engine's {actor} {part.name} {part.start} to {end} at element {part.offset} of {part.param}, "
            f"but the {other}"
        )
    return None


def _split_like(whole: ShardSlice, part: ShardSlice) -> Iterator[ShardSlice]:
    """Yields the slices of `whole` in the shape of `part`: the last dim as pairs, and one expert at a time."""
    if len(part.shape) > len(whole.shape):
        whole = as_pairs(whole)
    if len(whole.shape) < 2 or part.shape[0] > 1:
        yield whole
        return
    for row in range(whole.shape[0]):
        start, offset = (whole.start[0] + row, *whole.start[1:]), whole.offset + row * whole.strides[0]
        yield replace(whole, start=start, shape=(1, *whole.shape[1:]), offset=offset)


def _without_idle_strides(part: ShardSlice) -> ShardSlice:
    """Returns the slice with stride 0 in dims of size 1, where all strides are equivalent."""
    return replace(part, strides=tuple(0 if n == 1 else s for n, s in zip(part.shape, part.strides, strict=True)))
