"""HF <-> Megatron as data: a family is a table of rules, and a rule maps HF tensors to a sharded parameter. No torch.

    table (one family)  --slices_of(shape, layout)-->  list[ShardSlice]  (one rank)

Import, export, conversion and sync read the same slices, in any layouts. The engine's tables have vLLM's parameters.

In names, `{layer}` and `{expert}` are global on the HF side and local to the rank on the Megatron side. In an expert's
rule, a name without `{expert}` denotes a tensor that stacks all experts along an extra first dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, replace
from math import prod
from typing import Any, ClassVar, Literal, Protocol

from megarl.layout import Axis, Layout, Parallel, stage_layers
from megarl.models.shape import ModelShape

HF, MC = "model.layers.{layer}.", "decoder.layers.{layer}."
MTP = "mtp.layers.{layer}.transformer_layer."  # Megatron-Core 0.16's name; mtp_model_layer in 0.19
LayerSpec = Literal[
    "local", "te"
]  # the layer spec: Megatron's local one (CPU), or Transformer Engine's


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """[start, start + shape) of HF tensor `name` is `param` (contiguous) viewed with `strides` from element `offset`. A
    slice with one dim more than its tensor views the last dim as pairs, [..., n / 2, 2]: gpt-oss's gate and up."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    param: str
    offset: int
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


def whole_tensor(name: str, shape: tuple[int, ...]) -> ShardSlice:
    """Returns the slice of a parameter `name` that is the whole tensor of that name."""
    return ShardSlice(name, (0,) * len(shape), shape, name, 0, _strides(shape))


class Rule(Protocol):
    """A frozen dataclass that maps HF tensors to one parameter, which `tp` splits (expert_tensor for experts)."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def param(self) -> str: ...
    def shapes(self) -> dict[str, tuple[int, ...]]: ...
    def slices(self, tp: Axis) -> Iterator[ShardSlice]: ...


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True, slots=True)
class _OneTensor:
    hf: str
    param: str
    shape: tuple[int, ...]  # of the HF tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.hf: self.shape}

    def _slice(self, dim: int, start: int, count: int) -> ShardSlice:
        """Returns the slice of a parameter that holds only [start, start + count) of `dim`, in the tensor's order."""
        shape = (*self.shape[:dim], count, *self.shape[dim + 1 :])
        starts = tuple(start if axis == dim else 0 for axis in range(len(shape)))
        return ShardSlice(self.hf, starts, shape, self.param, 0, _strides(shape))


@dataclass(frozen=True, slots=True)
class Replicated(_OneTensor):
    """Replicated on every rank, or only on the first (a bias that is added before the sum over ranks)."""

    is_first_only: bool = False

    def slices(self, tp: Axis) -> Iterator[ShardSlice]:
        if tp.first or not self.is_first_only:
            yield self._slice(0, 0, self.shape[0])


@dataclass(frozen=True, slots=True)
class ShardDim0(_OneTensor):
    """Split along dim 0 (column-parallel linear, vocabulary). The parameter has `padded` rows, if that is more."""

    padded: int | None = None

    def slices(self, tp: Axis) -> Iterator[ShardSlice]:
        per_rank = (self.padded or self.shape[0]) // tp.size
        start = per_rank * tp.rank
        if (count := min(per_rank, self.shape[0] - start)) > 0:  # not only padding
            yield self._slice(0, start, count)


@dataclass(frozen=True, slots=True)
class ShardDim1(_OneTensor):
    """Split along dim 1 (row-parallel linear)."""

    def slices(self, tp: Axis) -> Iterator[ShardSlice]:
        count = self.shape[1] // tp.size
        yield self._slice(1, count * tp.rank, count)


@dataclass(frozen=True, slots=True)
class Transposed(_OneTensor):
    """HF's [in, out], stored as [out, in / tp]: a row-parallel linear layer, such as gpt-oss's down projection."""

    def slices(self, tp: Axis) -> Iterator[ShardSlice]:
        count = self.shape[0] // tp.size
        yield replace(self._slice(0, count * tp.rank, count), strides=(1, count))


@dataclass(frozen=True, slots=True)
class InterleavedGateUp(_OneTensor):
    """gpt-oss's experts: [in, 2 x out], or [2 x out] for a bias; gate and up alternate in the last dim, the
    parameter's rows. Megatron stores all gates, then all ups; vLLM stores them `alternating`."""

    alternating: bool = False

    def slices(self, tp: Axis) -> Iterator[ShardSlice]:
        *rest, rows = self.shape
        count, row = rows // 2 // tp.size, prod(rest)
        pair = (2 * row, row) if self.alternating else (row, count * row)
        start = (*(0 for _ in rest), count * tp.rank, 0)
        yield ShardSlice(
            self.hf, start, (*rest, count, 2), self.param, 0, (*(1 for _ in rest), *pair)
        )


@dataclass(frozen=True, slots=True)
class Stack:
    """HF tensors that differ only in rows, each split along dim 0, with a rank's shards stacked: gate and up in
    linear_fc1, or vLLM's qkv_proj."""

    hf: tuple[str, ...]
    param: str
    rows: tuple[int, ...]
    rest: tuple[int, ...]  # dims after the rows
    max_shards: tuple[
        int, ...
    ] = ()  # of each tensor; 0: no limit. Neighbours share one if the axis has more ranks

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: (rows, *self.rest) for name, rows in zip(self.hf, self.rows, strict=True)}

    def slices(self, tp: Axis) -> Iterator[ShardSlice]:
        offset = 0
        for (name, shape), limit in zip(
            self.shapes().items(), self.max_shards or [0] * len(self.hf), strict=True
        ):
            shards = min(tp.size, limit or tp.size)
            for part in ShardDim0(name, self.param, shape).slices(
                Axis(shards, tp.rank * shards // tp.size)
            ):
                yield replace(part, offset=offset)
                offset += part.numel


@dataclass(frozen=True, slots=True)
class Qkv:
    """q, k, v in Megatron's linear_qkv: per key-value group, its queries, its key, its value; groups split over tp."""

    hf: tuple[str, str, str]
    param: str
    heads: int
    kv_heads: int
    head_dim: int
    rest: tuple[int, ...]  # (hidden,) of a weight, () of a bias

    def shapes(self) -> dict[str, tuple[int, ...]]:
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        return {
            name: (size * self.head_dim, *self.rest)
            for name, size in zip(self.hf, sizes, strict=True)
        }

    def slices(self, tp: Axis) -> Iterator[ShardSlice]:
        queries, groups, offset = self.heads // self.kv_heads, self.kv_heads // tp.size, 0
        for group in range(tp.rank * groups, (tp.rank + 1) * groups):
            for name, heads in zip(self.hf, (queries, 1, 1), strict=True):
                shape = (heads * self.head_dim, *self.rest)
                start = (group * shape[0], *(0 for _ in self.rest))
                yield ShardSlice(name, start, shape, self.param, offset, _strides(shape))
                offset += prod(shape)


@dataclass(frozen=True, slots=True)
class Table:
    """The rules of one family. Those of `layer` repeat per layer, those of `expert` per layer and expert."""

    embedding: tuple[Rule, ...]  # first stage
    layer: tuple[Rule, ...]
    head: tuple[Rule, ...]  # last stage
    expert: tuple[Rule, ...] = ()
    dense: tuple[
        Rule, ...
    ] = ()  # instead of `layer` and `expert`, in leading layers without experts
    tied: tuple[Rule, ...] = ()  # the embedding's copy on a last stage that is not also the first
    mtp: tuple[
        Rule, ...
    ] = ()  # in addition to `layer` and `expert`, in each layer of multi-token prediction
    fp32: frozenset[str] = frozenset()  # HF names that are fp32 in any training dtype
    fp8: frozenset[str] = frozenset()  # HF names that move in FP8 blocks (megarl.models.fp8)


@dataclass(frozen=True, slots=True)
class _Group:
    """Rules with the values that fill in their names."""

    rules: tuple[Rule, ...]
    chunk: str = ""  # prefix of the parameter's name
    layer: int = 0  # global
    local_layer: int = 0
    block: str = MC
    experts: range | None = (
        None  # global indices of this rank's experts, if the rules repeat per expert
    )


def _groups(table: Table, shape: ModelShape, layout: Layout, *, mtp: bool) -> Iterator[_Group]:
    """Yields the rules for one rank, in the checkpoint's order."""
    per_rank = shape.experts // layout.ep.size
    experts = range(per_rank * layout.ep.rank, per_rank * (layout.ep.rank + 1))
    stages = stage_layers(shape.layers, layout)
    chunks = [f"chunk{number}." if len(stages) > 1 else "" for number in range(len(stages))]
    if layout.pp.first:
        yield _Group(table.embedding, chunks[0])
    for chunk, layers in zip(chunks, stages, strict=True):
        for local, layer in enumerate(layers):
            if layer < shape.dense_layers:
                yield _Group(table.dense, chunk, layer, local)
                continue
            yield _Group(table.layer, chunk, layer, local)
            yield _Group(table.expert, chunk, layer, local, experts=experts)
    if layout.pp.last:
        for depth in range(shape.mtp_layers if mtp else 0):
            number = (chunks[-1], shape.layers + depth, depth)
            yield _Group(table.layer, *number, MTP)
            yield _Group(table.mtp, *number)
            yield _Group(table.expert, *number, MTP, experts)
        yield _Group(table.head, chunks[-1])
        if not layout.pp.first:
            yield _Group(table.tied, chunks[-1])


def shapes_of(table: Table, shape: ModelShape, *, mtp: bool = False) -> dict[str, tuple[int, ...]]:
    """Returns the full shape of every tensor of the HF checkpoint, in the checkpoint's order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for group in _groups(table, shape, Layout.of(Parallel(), 1, 0), mtp=mtp):
        for rule in group.rules:
            for name, size in rule.shapes().items():
                if group.experts and "{expert}" not in name:
                    size = (shape.experts, *size)
                for expert in group.experts or (0,):
                    shapes[name.format(layer=group.layer, expert=expert)] = size
    return shapes


def slices_of(
    table: Table, shape: ModelShape, layout: Layout, *, mtp: bool = False
) -> list[ShardSlice]:
    """Returns one rank's slices of all HF tensors. With virtual stages, parameter names begin with `chunk<n>.`."""
    slices: list[ShardSlice] = []
    for group in _groups(table, shape, layout, mtp=mtp):
        for rule in group.rules:
            parts = list(rule.slices(layout.tp if group.experts is None else layout.etp))
            numel = sum(part.numel for part in parts)
            for local, expert in enumerate(group.experts or (0,)):
                for part in parts:
                    if group.experts:
                        part = of_expert(part, local, expert, numel)
                    name = part.name.format(layer=group.layer, expert=expert)
                    param = part.param.replace(MC, group.block).format(
                        layer=group.local_layer, expert=local
                    )
                    slices.append(replace(part, name=name, param=group.chunk + param))
    return slices


def slices_by_rank(table: Table, shape: ModelShape, layout: Layout) -> list[list[ShardSlice]]:
    """Returns the slices of every rank of a layout, given that of one."""
    layouts = (Layout.of(layout.sizes, layout.world, rank) for rank in range(layout.world))
    return [slices_of(table, shape, other) for other in layouts]


def of_expert(part: ShardSlice, local: int, expert: int, numel: int) -> ShardSlice:
    """Returns a rule's slice for one expert: at index `expert` of the first dim if the tensor stacks all experts, at
    offset `local` x `numel` (elements of one expert) if the parameter does."""
    if "{expert}" not in part.name:
        part = replace(
            part, start=(expert, *part.start), shape=(1, *part.shape), strides=(0, *part.strides)
        )
    return part if "{expert}" in part.param else replace(part, offset=local * numel + part.offset)


def as_pairs(part: ShardSlice) -> ShardSlice:
    """Returns the slice with its last dim viewed as pairs, [..., n / 2, 2]."""
    assert part.start[-1] % 2 == part.shape[-1] % 2 == 0, f"{part} splits a pair"
    return replace(
        part,
        start=(*part.start[:-1], part.start[-1] // 2, 0),
        shape=(*part.shape[:-1], part.shape[-1] // 2, 2),
        strides=(*part.strides[:-1], 2 * part.strides[-1], part.strides[-1]),
    )


# --- what moves is counted in units, elements of the smallest size: other tensors' last dim is a multiple longer


@dataclass(frozen=True, slots=True)
class ElementSizes:
    """Bytes of an element of each HF tensor, as it moves."""

    usual: int
    fp32: frozenset[str] = frozenset()  # names, or templates of names
    fp8: frozenset[str] = frozenset()

    @property
    def unit(self) -> int:
        return 1 if self.fp8 else self.usual

    def units(self, name: str) -> int:
        return (4 if name in self.fp32 else 1 if name in self.fp8 else self.usual) // self.unit


def in_units(slices: Iterable[ShardSlice], sizes: ElementSizes) -> list[ShardSlice]:
    """Returns all slices, those of larger elements widened; these must be contiguous in their last dim."""
    return [
        part if (count := sizes.units(part.name)) == 1 else _widen(part, count) for part in slices
    ]


def _widen(part: ShardSlice, count: int) -> ShardSlice:
    assert part.strides[-1] == 1 or part.shape[-1] == 1, f"{part} is not contiguous in its last dim"
    return replace(
        part,
        start=(*part.start[:-1], part.start[-1] * count),
        shape=(*part.shape[:-1], part.shape[-1] * count),
        offset=part.offset * count,
        strides=(*(stride * count for stride in part.strides[:-1]), 1),
    )


def shapes_in_units(
    shapes: Mapping[str, tuple[int, ...]], sizes: ElementSizes
) -> dict[str, tuple[int, ...]]:
    return {name: (*size[:-1], size[-1] * sizes.units(name)) for name, size in shapes.items()}


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
        actor, other = (
            ("loaders put", "table does not")
            if part in loaded
            else ("table puts", "loaders do not")
        )
        end = tuple(start + size for start, size in zip(part.start, part.shape, strict=True))
        place = f"{part.name} {part.start} to {end} at element {part.offset} of {part.param}"
        return f"the engine's {actor} {place}, but the {other}"
    return None


def _split_like(whole: ShardSlice, part: ShardSlice) -> Iterator[ShardSlice]:
    """Yields the slices of `whole` in the shape of `part`: the last dim as pairs, and one expert at a time."""
    if len(part.shape) > len(whole.shape):
        whole = as_pairs(whole)
    if len(whole.shape) < 2 or part.shape[0] > 1:
        yield whole
        return
    for row in range(whole.shape[0]):
        start, offset = (
            (whole.start[0] + row, *whole.start[1:]),
            whole.offset + row * whole.strides[0],
        )
        yield replace(whole, start=start, shape=(1, *whole.shape[1:]), offset=offset)


def _without_idle_strides(part: ShardSlice) -> ShardSlice:
    """Returns the slice with stride 0 in dims of size 1, where all strides are equivalent."""
    return replace(
        part,
        strides=tuple(0 if n == 1 else s for n, s in zip(part.shape, part.strides, strict=True)),
    )
