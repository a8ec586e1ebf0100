"""HF <-> Megatron as data: a family is a table of rules, and a rule maps HF tensors to a sharded
parameter. No torch.

    table (one family)  --slices_of(shape, layout)-->  list[ShardSlice]  (one rank)

Import, export, conversion and sync read the same slices, in any layout. The engine's tables have
vLLM's parameters.

In names, `{layer}` and `{expert}` are global on the HF side and local to the rank on the Megatron
side. In an expert's rule, a name without `{expert}` denotes a tensor that stacks all experts along
an extra first dim.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, filterfalse, product, zip_longest
from math import prod
from typing import Any, Literal

from megarl.layout import Axis, Layout, Parallel, stage_layers
from megarl.models.shape import LayerKind, ModelShape, Shape, ShapesByName

HF = "model.layers.{layer}."
MC = "decoder.layers.{layer}."
# Megatron-Core 0.16's name; mtp_model_layer in 0.19
MTP = "mtp.layers.{layer}.transformer_layer."
# the layer spec: Megatron's local one (CPU), or Transformer Engine's
LayerSpec = Literal["local", "te"]


@dataclass(frozen=True)
class ShardSlice:
    """The region [start, start + shape) of HF tensor `name`, which is a view of the contiguous
    `param` with `strides` from element `offset`. A slice with one more dim than its tensor views
    the last dim as pairs, [..., n / 2, 2]: gpt-oss's gate and up."""

    name: str
    start: Shape
    shape: Shape
    param: str
    offset: int
    strides: Shape

    @property
    def numel(self) -> int:
        return prod(self.shape)


Slices = Sequence[ShardSlice]
SlicesByName = dict[str, list[ShardSlice]]  # parameter or module -> slices


def whole_tensor(name: str, shape: Shape) -> ShardSlice:
    """Returns the slice of a parameter that stores the whole HF tensor of the same name."""
    return ShardSlice(name, (0,) * len(shape), shape, name, 0, _strides(shape))


def _strides(shape: Shape) -> Shape:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True)
class _OneTensor:
    hf: str
    param: str
    shape: Shape  # of the HF tensor

    def shapes(self) -> ShapesByName:
        return {self.hf: self.shape}

    def _slice(
        self,
        dim: int,
        first: int,
        count: int,
    ) -> ShardSlice:
        """Returns the slice of a parameter that contains only [first, first + count) of `dim`, in
        the tensor's order."""
        shape = (*self.shape[:dim], count, *self.shape[dim + 1 :])
        start = [0] * len(shape)
        start[dim] = first
        return ShardSlice(self.hf, tuple(start), shape, self.param, 0, _strides(shape))


@dataclass(frozen=True)
class Replicated(_OneTensor):
    """Replicated on every rank, or only on the first (a bias that is added before the sum over
    ranks)."""

    is_first_only: bool = False

    def slices(self, tp: Axis) -> Iterator[ShardSlice]:
        if tp.first or not self.is_first_only:
            yield self._slice(0, 0, self.shape[0])


@dataclass(frozen=True)
class ShardDim0(_OneTensor):
    """Split along dim 0 (column-parallel linear, vocabulary). The parameter has `padded` rows over
    all ranks, if that is set."""

    padded: int | None = None

    def slices(self, tp: Axis) -> Iterator[ShardSlice]:
        per_rank = (self.padded or self.shape[0]) // tp.size
        start = per_rank * tp.rank
        count = min(per_rank, self.shape[0] - start)
        if count > 0:  # not only padding
            yield self._slice(0, start, count)


@dataclass(frozen=True)
class ShardDim1(_OneTensor):
    """Split along dim 1 (row-parallel linear)."""

    def slices(self, tp: Axis) -> Iterator[ShardSlice]:
        count = self.shape[1] // tp.size
        yield self._slice(1, count * tp.rank, count)


@dataclass(frozen=True)
class Transposed(_OneTensor):
    """HF's [in, out], stored as [out, in / tp]: a row-parallel linear layer, such as gpt-oss's down
    projection."""

    def slices(self, tp: Axis) -> Iterator[ShardSlice]:
        count = self.shape[0] // tp.size
        yield replace(self._slice(0, count * tp.rank, count), strides=(1, count))


@dataclass(frozen=True)
class InterleavedGateUp(_OneTensor):
    """gpt-oss's experts: [in, 2 x out], or [2 x out] for a bias; gate and up alternate in the last
    dim, the parameter's rows. Megatron stores all gates, then all ups; vLLM stores them
    `alternating`."""

    alternating: bool = False

    def slices(self, tp: Axis) -> Iterator[ShardSlice]:
        *inputs, rows = self.shape
        count = rows // 2 // tp.size
        row = prod(inputs)
        pair = (row, count * row)
        if self.alternating:
            pair = (2 * row, row)
        dims = len(inputs)
        start = (*(0,) * dims, count * tp.rank, 0)
        strides = (*(1,) * dims, *pair)
        yield ShardSlice(self.hf, start, (*inputs, count, 2), self.param, 0, strides)


@dataclass(frozen=True)
class Stack:
    """HF tensors that differ only in rows, each split along dim 0, with a rank's shards stacked:
    gate and up in linear_fc1, or vLLM's qkv_proj."""

    hf: tuple[str, ...]
    param: str
    rows: Shape
    rest: Shape  # dims after the rows
    # per tensor; 0: no limit. If the axis has more ranks, neighbouring ranks share a shard
    max_shards: Shape = ()

    def shapes(self) -> ShapesByName:
        return {name: (rows, *self.rest) for name, rows in zip(self.hf, self.rows, strict=True)}

    def slices(self, tp: Axis) -> Iterator[ShardSlice]:
        offset = 0
        for (name, shape), limit in zip_longest(self.shapes().items(), self.max_shards):
            shards = min(tp.size, limit or tp.size)
            axis = Axis(shards, tp.rank * shards // tp.size)
            for part in ShardDim0(name, self.param, shape).slices(axis):
                yield replace(part, offset=offset)
                offset += part.numel


@dataclass(frozen=True)
class Qkv:
    """q, k, v in Megatron's linear_qkv: per key-value group, its queries, its key, its value;
    groups split over tp."""

    hf: tuple[str, str, str]
    param: str
    heads: int
    kv_heads: int
    head_dim: int
    rest: Shape  # (hidden,) of a weight, () of a bias

    def shapes(self) -> ShapesByName:
        heads = (self.heads, self.kv_heads, self.kv_heads)
        return {
            name: (count * self.head_dim, *self.rest)
            for name, count in zip(self.hf, heads, strict=True)
        }

    def slices(self, tp: Axis) -> Iterator[ShardSlice]:
        queries = self.heads // self.kv_heads
        groups = self.kv_heads // tp.size
        offset = 0
        for group in range(tp.rank * groups, (tp.rank + 1) * groups):
            for name, heads in zip(self.hf, (queries, 1, 1), strict=True):
                shape = (heads * self.head_dim, *self.rest)
                start = (group * shape[0], *(0,) * len(self.rest))
                yield ShardSlice(name, start, shape, self.param, offset, _strides(shape))
                offset += prod(shape)


# a Rule maps HF tensors to one parameter, which `tp` splits (expert_tensor for experts)
Rule = Replicated | ShardDim0 | ShardDim1 | Transposed | InterleavedGateUp | Stack | Qkv
Rules = tuple[Rule, ...]


def is_expert(rule: Rule) -> bool:
    """Returns True if the rule repeats per expert: its parameter is in Megatron's or vLLM's module
    `experts`."""
    return ".experts." in rule.param


@dataclass(frozen=True)
class Table:
    """The rules of one family."""

    embedding: Rules  # first stage
    layers: Mapping[LayerKind, Rules]
    head: Rules  # last stage
    tied: Rules = ()  # the embedding's copy on a last stage that is not also the first
    mtp: Rules = ()  # in addition to the layer's, in each layer of multi-token prediction
    # HF name -> bits of an element, for tensors that do not move in the training dtype
    bits: Mapping[str, int] = field(default_factory=dict)

    @property
    def layer_rules(self) -> Rules:
        """The rules of all kinds of layers, with those of experts last."""
        return tuple(sorted(chain.from_iterable(self.layers.values()), key=is_expert))

    def rules_of(self, shape: ModelShape, layer: int) -> tuple[Rules, Rules]:
        """Returns the rules of a global layer, and those of its experts. Raises ValueError if the
        table has no rules for this kind of layer."""
        kind = shape.kind(layer)
        if kind not in self.layers:
            raise ValueError(
                f"layer {layer} of {shape.family} is of kind {kind.name}, but the family's table "
                f"has rules for {', '.join(known.name for known in self.layers)} only; add them"
            )
        rules = self.layers[kind]
        return tuple(filterfalse(is_expert, rules)), tuple(filter(is_expert, rules))

    def map_layers(self, function: Callable[[Rules], Iterable[Rule]]) -> "Table":
        """Returns the table with `function` applied to the rules of every kind of layer."""
        layers = {kind: tuple(function(rules)) for kind, rules in self.layers.items()}
        return replace(self, layers=layers)


def by_prefix(chunks: Sequence[Any]) -> dict[str, Any]:
    """Returns {prefix of parameter names: chunk}; the prefix is "" if there is a single chunk."""
    if len(chunks) == 1:
        return {"": chunks[0]}
    return {f"chunk{number}.": chunk for number, chunk in enumerate(chunks)}


@dataclass(frozen=True)
class _Group:
    """Rules with the values that fill in their names."""

    rules: Rules
    chunk: str = ""  # prefix of the parameter's name
    layer: int = 0  # global
    local_layer: int = 0
    block: str = MC


def _groups(
    table: Table,
    shape: ModelShape,
    layout: Layout,
    *,
    mtp: bool,
) -> Iterator[_Group]:
    """Yields the rules for one rank, in the checkpoint's order."""
    chunks = by_prefix(stage_layers(shape.layers, layout))
    prefixes = list(chunks)
    if layout.pp.first:
        yield _Group(table.embedding, prefixes[0])
    for chunk, layers in chunks.items():
        for local, layer in enumerate(layers):
            rules, experts = table.rules_of(shape, layer)
            yield _Group(rules + experts, chunk, layer, local)
    if not layout.pp.last:
        return
    last = prefixes[-1]
    for depth in range(shape.mtp_layers):
        if mtp:
            layer = shape.layers + depth
            rules, experts = table.rules_of(shape, layer)
            yield _Group(rules + table.mtp + experts, last, layer, depth, MTP)
    yield _Group(table.head, last)
    if not layout.pp.first:
        yield _Group(table.tied, last)


def parameters_of(
    table: Table, shape: ModelShape, layout: Layout
) -> Iterator[tuple[str, Rule, int, int]]:
    """Yields (chunk, rule, elements, copies) of a rank's parameters: of the fullest tensor rank,
    with the rows that pad the vocabulary. Only experts have more than one copy."""
    sizes = {}  # id of a rule, which many layers share -> elements
    for group in _groups(table, shape, layout, mtp=False):
        for rule in group.rules:
            ranks = layout.etp.size if is_expert(rule) else layout.tp.size
            if id(rule) not in sizes:
                sizes[id(rule)] = sum(part.numel for part in rule.slices(Axis(ranks)))
                if isinstance(rule, ShardDim0) and rule.padded:
                    sizes[id(rule)] = rule.padded // ranks * prod(rule.shape[1:])
            copies = shape.experts // layout.ep.size if is_expert(rule) else 1
            yield group.chunk, rule, sizes[id(rule)], copies


def shapes_of(table: Table, shape: ModelShape, *, mtp: bool = False) -> ShapesByName:
    """Returns the full shape of every tensor of the HF checkpoint, in the checkpoint's order."""
    shapes = {}
    for group in _groups(table, shape, Layout.of(Parallel(), 1, 0), mtp=mtp):
        for rule in group.rules:
            for name, size in rule.shapes().items():
                if is_expert(rule) and "{expert}" not in name:
                    size = (shape.experts, *size)
                for expert in range(shape.experts if is_expert(rule) else 1):
                    shapes[name.format(layer=group.layer, expert=expert)] = size
    return shapes


def slices_of(
    table: Table,
    shape: ModelShape,
    layout: Layout,
    *,
    mtp: bool = False,
) -> list[ShardSlice]:
    """Returns one rank's slices of all HF tensors. With virtual stages, parameter names begin with
    `chunk<n>.`."""
    slices = []
    per_rank = shape.experts // layout.ep.size
    for group in _groups(table, shape, layout, mtp=mtp):
        for rule in group.rules:
            count = per_rank if is_expert(rule) else 1
            parts = list(rule.slices(layout.etp if is_expert(rule) else layout.tp))
            numel = sum(part.numel for part in parts)
            for local, part in product(range(count), parts):
                expert = per_rank * layout.ep.rank + local
                if is_expert(rule):
                    part = of_expert(part, local, expert, numel)
                template = group.chunk + part.param.replace(MC, group.block)
                part = replace(
                    part,
                    name=part.name.format(layer=group.layer, expert=expert),
                    param=template.format(layer=group.local_layer, expert=local),
                )
                slices.append(part)
    return slices


def slices_by_rank(table: Table, shape: ModelShape, layout: Layout) -> list[list[ShardSlice]]:
    """Returns the slices of every rank, by rank. `layout` may be that of any rank."""
    return [
        slices_of(table, shape, Layout.of(layout.sizes, layout.world, rank))
        for rank in range(layout.world)
    ]


def of_expert(
    part: ShardSlice,
    local: int,
    expert: int,
    numel: int,
) -> ShardSlice:
    """Returns a rule's slice for one expert: at index `expert` of the first dim if the tensor
    stacks all experts, at offset `local` x `numel` (elements of one expert) if the parameter
    does."""
    if "{expert}" not in part.name:
        part = replace(
            part,
            start=(expert, *part.start),
            shape=(1, *part.shape),
            strides=(0, *part.strides),
        )
    if "{expert}" not in part.param:
        part = replace(part, offset=local * numel + part.offset)
    return part


def as_pairs(part: ShardSlice) -> ShardSlice:
    """Returns the slice with its last dim viewed as pairs, [..., n / 2, 2]."""
    *start, first = part.start
    *shape, size = part.shape
    *strides, step = part.strides
    assert first % 2 == size % 2 == 0, f"{part} splits a pair"
    return replace(
        part,
        start=(*start, first // 2, 0),
        shape=(*shape, size // 2, 2),
        strides=(*strides, 2 * step, step),
    )


def without_pairs(box: ShardSlice, dims: int) -> tuple[Shape, Shape]:
    """Returns (start, shape) of a slice that may view its tensor's last dim as [..., n / 2, 2]."""
    if len(box.shape) != dims + 1:
        return box.start, box.shape
    start = (*box.start[:-2], 2 * box.start[-2])
    return start, (*box.shape[:-2], 2 * box.shape[-2])


# --- a sync counts in units: the size of the smallest elements, but at least a byte. The last dim
# of a tensor with larger elements is a multiple longer; with smaller ones, a fraction as long


@dataclass(frozen=True)
class ElementSizes:
    """Bits per element of each HF tensor while it moves."""

    usual: int
    others: Mapping[str, int]  # HF name, or name template -> bits

    @property
    def unit(self) -> int:
        return max(8, min([self.usual, *self.others.values()]))


def in_units(slices: Iterable[ShardSlice], sizes: ElementSizes) -> list[ShardSlice]:
    unit = sizes.unit
    return [recounted(part, sizes.others.get(part.name, sizes.usual), unit) for part in slices]


def recounted(part: ShardSlice, bits: int, unit: int) -> ShardSlice:
    """Returns the slice, whose elements have `bits` bits, counted in units of `unit` bits. Its last
    dim must be contiguous. Raises ValueError if the rows do not fill whole units."""
    if bits == unit:
        return part
    *start, first = part.start
    *shape, size = part.shape
    *strides, step = part.strides
    assert step == 1 or size == 1, f"{part} is not contiguous in its last dim"
    if any(count * bits % unit for count in (first, size, part.offset, *strides)):
        raise ValueError(
            f"{part.name}: rows of {size} elements from {first} on, of {bits} bits each, do not "
            f"fill units of {unit} bits; choose a format of {unit} bits, or "
            "rollout.quantization=none"
        )
    return replace(
        part,
        start=(*start, first * bits // unit),
        shape=(*shape, size * bits // unit),
        offset=part.offset * bits // unit,
        strides=(*(stride * bits // unit for stride in strides), 1),
    )


def first_mismatch(table: Iterable[ShardSlice], recorded: Iterable[ShardSlice]) -> str | None:
    """Returns an error message for the first tensor that vLLM's loaders place differently from the
    table, or None."""
    expected = set(map(_without_idle_strides, table))
    by_name = {part.name: part for part in expected}
    loaded = set()
    for whole in recorded:
        if whole.numel:  # not only padding
            parts = _split_like(whole, by_name.get(whole.name, whole))
            loaded.update(map(_without_idle_strides, parts))
    for part in sorted(loaded ^ expected, key=str):
        end = tuple(start + size for start, size in zip(part.start, part.shape, strict=True))
        place = f"{part.name} {part.start} to {end} at element {part.offset} of {part.param}"
        if part in loaded:
            return f"the engine's loaders put {place}, but the table does not"
        return f"the engine's table puts {place}, but the loaders do not"
    return None


def _split_like(whole: ShardSlice, part: ShardSlice) -> Iterator[ShardSlice]:
    """Yields the slices of `whole` in the shape of `part`: the last dim viewed as pairs, and a
    slice per expert."""
    if len(part.shape) > len(whole.shape):
        whole = as_pairs(whole)
    if len(whole.shape) < 2 or part.shape[0] > 1:
        yield whole
        return
    for row in range(whole.shape[0]):
        yield replace(
            whole,
            start=(whole.start[0] + row, *whole.start[1:]),
            shape=(1, *whole.shape[1:]),
            offset=whole.offset + row * whole.strides[0],
        )


def _without_idle_strides(part: ShardSlice) -> ShardSlice:
    """Returns the slice with stride 0 in dims of size 1, where all strides are equivalent."""
    strides = list(part.strides)
    for dim, size in enumerate(part.shape):
        if size == 1:
            strides[dim] = 0
    return replace(part, strides=tuple(strides))
