"""HF <-> Megatron as data: a family is a table of rules, a rule says where HF tensors lie in a sharded parameter.

    table (one family)  --boxes(shape, layout)-->  list[Box]  (one rank)

Import, export, conversion and sync all read the same boxes: whoever holds [start, start + shape) of an
HF tensor on both sides can copy it, whatever the two layouts are. No torch here.

In names, `{layer}` and `{expert}` are global on the HF side and local to the rank on the Megatron side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, Protocol

from megarl.config.model import ModelShape
from megarl.layout import Axis, Layout, stage_layers

__all__ = ["Box", "Cols", "Fused", "Qkv", "Rows", "Rule", "Style", "Table", "Whole", "boxes_of", "shapes_of"]

Style = Literal["local", "te"]  # which layer spec built the module: Megatron's local one (CPU) or Transformer Engine's


@dataclass(frozen=True, slots=True)
class Box:
    """[start, start + shape) of HF tensor `name` is `param` viewed with `strides` from `offset` (elements).

    `offset` counts from the parameter's first element, and the parameter is contiguous.
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
    def boxes(self, tp: Axis) -> Iterator[Box]: ...


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True, slots=True)
class Whole:
    """Replicated: every rank holds all of it."""

    hf: str
    param: str
    shape: tuple[int, ...]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.hf: self.shape}

    def boxes(self, tp: Axis) -> Iterator[Box]:
        yield Box(self.hf, (0,) * len(self.shape), self.shape, self.param, 0, _strides(self.shape))


@dataclass(frozen=True, slots=True)
class Rows:
    """Split along dim 0 (column-parallel linear, vocabulary). `padded` rows on the Megatron side, if more."""

    hf: str
    param: str
    shape: tuple[int, ...]
    padded: int | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.hf: self.shape}

    def boxes(self, tp: Axis) -> Iterator[Box]:
        rows, *rest = self.shape
        held = (self.padded or rows) // tp.size
        start = held * tp.rank
        here = min(start + held, rows) - start
        if here > 0:
            shape = (here, *rest)
            yield Box(self.hf, (start, *(0 for _ in rest)), shape, self.param, 0, _strides(shape))


@dataclass(frozen=True, slots=True)
class Cols:
    """Split along dim 1 (row-parallel linear)."""

    hf: str
    param: str
    shape: tuple[int, int]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.hf: self.shape}

    def boxes(self, tp: Axis) -> Iterator[Box]:
        rows, cols = self.shape
        held = cols // tp.size
        yield Box(self.hf, (0, held * tp.rank), (rows, held), self.param, 0, (held, 1))


@dataclass(frozen=True, slots=True)
class Fused:
    """Several HF tensors of one shape, each split along dim 0, a rank's parts stacked: gate and up in linear_fc1."""

    hf: tuple[str, ...]
    param: str
    shape: tuple[int, ...]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(self.hf, self.shape)

    def boxes(self, tp: Axis) -> Iterator[Box]:
        for position, name in enumerate(self.hf):
            for box in Rows(name, self.param, self.shape).boxes(tp):
                yield replace(box, offset=position * box.numel)


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

    def boxes(self, tp: Axis) -> Iterator[Box]:
        per_group = self.heads // self.kv_heads
        groups = self.kv_heads // tp.size
        row = prod(self.rest)
        for local in range(groups):
            at = local * (per_group + 2) * self.head_dim
            for name, heads in zip(self.hf, (per_group, 1, 1), strict=True):
                rows = heads * self.head_dim
                start = (tp.rank * groups + local) * rows
                shape = (rows, *self.rest)
                yield Box(name, (start, *(0 for _ in self.rest)), shape, self.param, at * row, _strides(shape))
                at += rows


@dataclass(frozen=True, slots=True)
class Table:
    """One family. `layer` rules repeat per layer, `expert` rules per layer and expert."""

    embedding: tuple[Rule, ...]  # first stage
    layer: tuple[Rule, ...]
    head: tuple[Rule, ...]  # last stage
    expert: tuple[Rule, ...] = ()
    tied: tuple[Rule, ...] = ()  # the embedding's copy on a last stage that is not also the first


def shapes_of(table: Table, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the HF checkpoint with its full shape, in the checkpoint's order."""
    found: dict[str, tuple[int, ...]] = {}

    def add(rules: tuple[Rule, ...], **numbers: int) -> None:
        for rule in rules:
            for name, size in rule.shapes().items():
                found[name.format(**numbers)] = size

    add(table.embedding)
    for layer in range(shape.layers):
        add(table.layer, layer=layer)
        for expert in range(shape.experts):
            add(table.expert, layer=layer, expert=expert)
    add(table.head)
    return found


def boxes_of(table: Table, shape: ModelShape, layout: Layout) -> list[Box]:
    """What one rank holds of every HF tensor. With virtual stages names begin with their chunk: `chunk1.decoder...`"""
    found: list[Box] = []
    chunks = stage_layers(shape.layers, layout)
    prefixes = [f"chunk{number}." if len(chunks) > 1 else "" for number in range(len(chunks))]

    def add(rules: tuple[Rule, ...], tp: Axis, chunk: str, hf: dict[str, int], local: dict[str, int]) -> None:
        for rule in rules:
            for box in rule.boxes(tp):
                found.append(replace(box, name=box.name.format(**hf), param=chunk + box.param.format(**local)))

    if layout.pp.first:
        add(table.embedding, layout.tp, prefixes[0], {}, {})
    experts = shape.experts // layout.ep.size
    for chunk, layers in zip(prefixes, chunks, strict=True):
        for here, layer in enumerate(layers):
            add(table.layer, layout.tp, chunk, {"layer": layer}, {"layer": here})
            for expert in range(experts):
                hf = {"layer": layer, "expert": layout.ep.rank * experts + expert}
                add(table.expert, layout.etp, chunk, hf, {"layer": here, "expert": expert})
    if layout.pp.last:
        add(table.head, layout.tp, prefixes[-1], {}, {})
        if not layout.pp.first:
            add(table.tied, layout.tp, prefixes[-1], {}, {})
    return found
