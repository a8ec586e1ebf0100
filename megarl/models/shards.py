"""HF <-> Megatron as data: a family is a table of rules, a rule says where HF tensors lie in a sharded parameter.

    table (one family)  --boxes(shape, layout)-->  list[ShardSlice]  (one rank)

Import, export, conversion and sync all read the same boxes: whoever holds [start, start + shape) of an
HF tensor on both sides can copy it, whatever the two layouts are. No torch here.

In names, `{layer}` and `{expert}` are global on the HF side and local to the rank on the Megatron side. A name of
an expert's tensor without `{expert}` holds all experts, one after another along a first dim. The engine's side is the
same language: a table whose parameters are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, Protocol

from megarl.layout import Axis, Layout, stage_layers
from megarl.models.shape import ModelShape

__all__ = [
    "InterleavedGateUp",
    "Qkv",
    "Replicated",
    "Rule",
    "ShardDim0",
    "ShardDim1",
    "ShardSlice",
    "Stack",
    "Style",
    "Table",
    "Transposed",
    "by_pairs",
    "of_expert",
    "shapes_of",
    "slices_of",
]  # fmt: skip

Style = Literal["local", "te"]  # which layer spec built the module: Megatron's local one (CPU) or Transformer Engine's


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """[start, start + shape) of HF tensor `name` is `param` viewed with `strides` from `offset` (elements).

    `offset` counts from the parameter's first element, and the parameter is contiguous. A box with one dim more than
    its tensor sees the tensor's last dim as pairs, [..., n / 2, 2]: gpt-oss lets gate and up alternate there.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    param: str
    offset: int
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


class Rule(Protocol):
    """HF tensors in one Megatron parameter. `tp` is the axis that splits it (expert_tensor for experts)."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...
    def boxes(self, tp: Axis) -> Iterator[ShardSlice]: ...


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True, slots=True)
class Replicated:
    """Replicated: every rank holds all of it, or the first one alone (where results are summed over the ranks)."""

    hf: str
    param: str
    shape: tuple[int, ...]
    is_first_only: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.hf: self.shape}

    def boxes(self, tp: Axis) -> Iterator[ShardSlice]:
        if self.is_first_only and not tp.first:
            return
        yield ShardSlice(self.hf, (0,) * len(self.shape), self.shape, self.param, 0, _strides(self.shape))


@dataclass(frozen=True, slots=True)
class ShardDim0:
    """Split along dim 0 (column-parallel linear, vocabulary). `padded` rows on the Megatron side, if more."""

    hf: str
    param: str
    shape: tuple[int, ...]
    padded: int | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.hf: self.shape}

    def boxes(self, tp: Axis) -> Iterator[ShardSlice]:
        rows, *rest = self.shape
        held = (self.padded or rows) // tp.size
        start = held * tp.rank
        here = min(start + held, rows) - start
        if here > 0:
            shape = (here, *rest)
            yield ShardSlice(self.hf, (start, *(0 for _ in rest)), shape, self.param, 0, _strides(shape))


@dataclass(frozen=True, slots=True)
class ShardDim1:
    """Split along dim 1 (row-parallel linear)."""

    hf: str
    param: str
    shape: tuple[int, int]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.hf: self.shape}

    def boxes(self, tp: Axis) -> Iterator[ShardSlice]:
        rows, cols = self.shape
        held = cols // tp.size
        yield ShardSlice(self.hf, (0, held * tp.rank), (rows, held), self.param, 0, (held, 1))


@dataclass(frozen=True, slots=True)
class Stack:
    """HF tensors that differ in rows only, each split along dim 0, a rank's parts stacked: gate and up in linear_fc1.

    `most` parts a tensor is split into where the axis has more ranks, 0: no limit. Ranks beyond hold copies, as vLLM
    repeats key-value heads; 1 is whole on every rank.
    """

    hf: tuple[str, ...]
    param: str
    rows: tuple[int, ...]
    rest: tuple[int, ...]  # dims after the rows
    max_shards: tuple[int, ...] = ()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: (rows, *self.rest) for name, rows in zip(self.hf, self.rows, strict=True)}

    def boxes(self, tp: Axis) -> Iterator[ShardSlice]:
        offset = 0
        for (name, shape), max_parts in zip(self.shapes().items(), self.max_shards or [0] * len(self.hf), strict=True):
            parts = min(tp.size, max_parts or tp.size)
            for box in ShardDim0(name, self.param, shape).boxes(Axis(parts, tp.rank * parts // tp.size)):
                yield replace(box, offset=offset)
                offset += box.numel


@dataclass(frozen=True, slots=True)
class InterleavedGateUp:
    """gpt-oss's experts: [..., 2 x inner] whose last dim alternates gate and up, and is the parameter's rows.

    Megatron wants all gates, then all ups; `alternating` keeps them as they are (vLLM). `hidden` 0: a bias.
    """

    hf: str
    param: str
    hidden: int
    inner: int
    alternating: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.hf: (*self._lead, 2 * self.inner)}

    @property
    def _lead(self) -> tuple[int, ...]:
        return (self.hidden,) if self.hidden else ()

    def boxes(self, tp: Axis) -> Iterator[ShardSlice]:
        here, row = self.inner // tp.size, max(1, self.hidden)
        pair = (2 * row, row) if self.alternating else (row, here * row)
        start = (*(0 for _ in self._lead), here * tp.rank, 0)
        yield ShardSlice(self.hf, start, (*self._lead, here, 2), self.param, 0, (*(1 for _ in self._lead), *pair))


@dataclass(frozen=True, slots=True)
class Transposed:
    """[inner, hidden] of HF is [hidden, inner / tp] of the parameter: gpt-oss's down projection."""

    hf: str
    param: str
    inner: int
    hidden: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.hf: (self.inner, self.hidden)}

    def boxes(self, tp: Axis) -> Iterator[ShardSlice]:
        here = self.inner // tp.size
        yield ShardSlice(self.hf, (here * tp.rank, 0), (here, self.hidden), self.param, 0, (1, here))


@dataclass(frozen=True, slots=True)
class Qkv:
    """q, k, v in linear_qkv: per key-value group, its queries, its key, its value; groups split over tp."""

    hf: tuple[str, str, str]
    param: str
    heads: int
    kv_heads: int
    head_dim: int
    rest: tuple[int, ...]  # (hidden,) of a weight, () of a bias

    def shapes(self) -> dict[str, tuple[int, ...]]:
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        return {name: (size * self.head_dim, *self.rest) for name, size in zip(self.hf, sizes, strict=True)}

    def boxes(self, tp: Axis) -> Iterator[ShardSlice]:
        per_group = self.heads // self.kv_heads
        groups = self.kv_heads // tp.size
        row = prod(self.rest)
        for local in range(groups):
            at = local * (per_group + 2) * self.head_dim
            for name, heads in zip(self.hf, (per_group, 1, 1), strict=True):
                rows = heads * self.head_dim
                start = (tp.rank * groups + local) * rows
                shape = (rows, *self.rest)
                yield ShardSlice(name, (start, *(0 for _ in self.rest)), shape, self.param, at * row, _strides(shape))
                at += rows


@dataclass(frozen=True, slots=True)
class Table:
    """One family. `layer` rules repeat per layer, `expert` rules per layer and expert."""

    embedding: tuple[Rule, ...]  # first stage
    layer: tuple[Rule, ...]
    head: tuple[Rule, ...]  # last stage
    expert: tuple[Rule, ...] = ()
    dense: tuple[Rule, ...] = ()  # instead of `layer` and `expert`, in leading layers without experts
    tied: tuple[Rule, ...] = ()  # the embedding's copy on a last stage that is not also the first
    mtp: tuple[Rule, ...] = ()  # beside `layer` and `expert`, in each layer of multi-token prediction
    fp32: frozenset[str] = frozenset()  # HF names that stay fp32, whatever the training dtype is


def shapes_of(table: Table, shape: ModelShape, *, mtp: bool = False) -> dict[str, tuple[int, ...]]:
    """Every tensor of the HF checkpoint with its full shape, in the checkpoint's order."""
    found: dict[str, tuple[int, ...]] = {}

    def add(rules: tuple[Rule, ...], **numbers: int) -> None:
        for rule in rules:
            for name, size in rule.shapes().items():
                found[name.format(**numbers)] = size

    add(table.embedding)
    for layer in range(shape.layers + (shape.mtp_layers if mtp else 0)):
        if layer < shape.dense_layers:
            add(table.dense, layer=layer)
            continue
        add(table.layer, layer=layer)
        if layer >= shape.layers:
            add(table.mtp, layer=layer)
        for rule in table.expert:
            for name, size in rule.shapes().items():
                if "{expert}" not in name:
                    found[name.format(layer=layer)] = (shape.experts, *size)
                    continue
                for expert in range(shape.experts):
                    found[name.format(layer=layer, expert=expert)] = size
    add(table.head)
    return found


def slices_of(table: Table, shape: ModelShape, layout: Layout, *, mtp: bool = False) -> list[ShardSlice]:
    """What one rank holds of every HF tensor. With virtual stages names begin with their chunk: `chunk1.decoder...`"""
    found: list[ShardSlice] = []
    chunks = stage_layers(shape.layers, layout)
    prefixes = [f"chunk{number}." if len(chunks) > 1 else "" for number in range(len(chunks))]
    experts = shape.experts // layout.ep.size

    def add(rules: tuple[Rule, ...], chunk: str, hf: dict[str, int], local: dict[str, int]) -> None:
        for rule in rules:
            for box in rule.boxes(layout.tp):
                found.append(replace(box, name=box.name.format(**hf), param=chunk + box.param.format(**local)))

    def add_layer(chunk: str, layer: int, here: int) -> None:
        if layer < shape.dense_layers:
            add(table.dense, chunk, {"layer": layer}, {"layer": here})
            return
        add(table.layer, chunk, {"layer": layer}, {"layer": here})
        for rule in table.expert:
            boxes = list(rule.boxes(layout.etp))
            for expert in range(experts):
                for box in boxes:
                    at = of_expert(box, expert, layout.ep.rank * experts + expert, sum(b.numel for b in boxes))
                    name = at.name.format(layer=layer, expert=layout.ep.rank * experts + expert)
                    found.append(replace(at, name=name, param=chunk + at.param.format(layer=here, expert=expert)))

    if layout.pp.first:
        add(table.embedding, prefixes[0], {}, {})
    for chunk, layers in zip(prefixes, chunks, strict=True):
        for here, layer in enumerate(layers):
            add_layer(chunk, layer, here)
    if layout.pp.last:
        for depth in range(shape.mtp_layers if mtp else 0):
            begin = len(found)
            add_layer(prefixes[-1], shape.layers + depth, depth)
            # as Megatron-Core 0.16 calls it; 0.19 says mtp_model_layer
            old, new = f"decoder.layers.{depth}.", f"mtp.layers.{depth}.transformer_layer."
            found[begin:] = [replace(box, param=box.param.replace(old, new, 1)) for box in found[begin:]]
            add(table.mtp, prefixes[-1], {"layer": shape.layers + depth}, {"layer": depth})
        add(table.head, prefixes[-1], {}, {})
        if not layout.pp.first:
            add(table.tied, prefixes[-1], {}, {})
    return found


def of_expert(box: ShardSlice, local: int, expert: int, numel: int) -> ShardSlice:
    """A rule's box for one expert: along the first dim where the tensor holds all experts, behind the others' elements
    (`numel` each) where the parameter does."""
    if "{expert}" not in box.name:
        box = replace(box, start=(expert, *box.start), shape=(1, *box.shape), strides=(0, *box.strides))
    return box if "{expert}" in box.param else replace(box, offset=local * numel + box.offset)


def by_pairs(box: ShardSlice) -> ShardSlice:
    """A box of whole pairs in its last dim, seen as [..., n / 2, 2]."""
    assert box.start[-1] % 2 == box.shape[-1] % 2 == 0, f"{box} cuts a pair"
    return replace(
        box,
        start=(*box.start[:-1], box.start[-1] // 2, 0),
        shape=(*box.shape[:-1], box.shape[-1] // 2, 2),
        strides=(*box.strides[:-1], 2 * box.strides[-1], box.strides[-1]),
    )
