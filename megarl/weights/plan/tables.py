"""What moves, which ranks have it and which keep it (a Placement): from the tables of trainer and engine, or from
recorded slices.

(coordinate, ShardSlice) of the trainer  x  of the engine  --transfer_groups-->  TransferGroups
FleetTables: groups of templates, once for all layers and experts; a coordinate is a rank along the axis that splits the
             tensor: template, rank, layer, expert --source | destination--> ShardSlice
RecordedSlices: the same from the slices of every rank, for a family without a table; a coordinate is a rank
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from megarl.layout import Axis, Layout, stage_layers
from megarl.models.shape import ModelShape
from megarl.models.shards import ElementSizes, Rule, ShardSlice, Table, in_units, of_expert
from megarl.weights.fleet import Fleet

Ints = NDArray[np.integer]
SlicesByRank = Sequence[Sequence[ShardSlice]]
EMBEDDING = -1  # as a layer; the head is layer `shape.layers`
Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # (start, shape)


@dataclass(frozen=True, slots=True)
class Overlap:
    """[start, start + shape) of one HF tensor, and the slices of both sides that contain it, by coordinate."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    sources: Mapping[int, ShardSlice]
    destinations: Mapping[int, ShardSlice]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class TransferGroup:
    """Overlaps that move together, from any coordinate of `sources` to all of `destinations`."""

    overlaps: tuple[Overlap, ...]
    unit: int  # order within a layer
    repeats: int = 1  # number of consecutive experts

    @property
    def sources(self) -> tuple[int, ...]:
        return tuple(self.overlaps[0].sources)

    @property
    def destinations(self) -> tuple[int, ...]:
        return tuple(self.overlaps[0].destinations)

    @property
    def numel(self) -> int:
        return self.repeats * sum(overlap.numel for overlap in self.overlaps)


def transfer_groups(
    sources: Iterable[tuple[int, ShardSlice]],
    destinations: Iterable[tuple[int, ShardSlice]],
    *,
    max_numel: int,
    is_expert: bool = False,
) -> list[TransferGroup]:
    """Returns groups of at most `max_numel` elements, split along dim 0 if necessary; a single row may be larger. Each
    tensor is a unit, or with `is_expert` all are one. Raises ValueError naming the tensor if the sources overlap, or do
    not cover a destination."""
    senders, receivers = _by_rectangle(sources), _by_rectangle(destinations)
    groups: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[Overlap]] = {}
    for unit, (name, rectangles) in enumerate(receivers.items()):
        for one, other in combinations(senders.get(name, {}), 2):
            if intersect(one, other) is not None:
                shown = " and ".join(f"{start}+{shape}" for start, shape in (one, other))
                raise ValueError(f"{name}: two source rectangles overlap: {shown}")
        for overlap in _overlaps(name, senders.get(name, {}), rectangles):
            key = (0 if is_expert else unit, tuple(overlap.sources), tuple(overlap.destinations))
            groups.setdefault(key, []).append(overlap)
    return [
        group
        for (unit, *_), overlaps in groups.items()
        for group in _split(overlaps, unit, max_numel)
    ]


def intersect(one: Rectangle, other: Rectangle) -> Rectangle | None:
    start = tuple(map(max, one[0], other[0]))
    ends = (min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    shape = tuple(end - first for end, first in zip(ends, start, strict=True))
    return None if any(size <= 0 for size in shape) else (start, shape)


def _by_rectangle(
    slices: Iterable[tuple[int, ShardSlice]],
) -> dict[str, dict[Rectangle, list[tuple[int, ShardSlice]]]]:
    by_name: dict[str, dict[Rectangle, list[tuple[int, ShardSlice]]]] = {}
    for coordinate, part in slices:
        by_name.setdefault(part.name, {}).setdefault((part.start, part.shape), []).append(
            (coordinate, part)
        )
    return by_name


def _overlaps(
    name: str,
    sources: Mapping[Rectangle, Sequence[tuple[int, ShardSlice]]],
    destinations: Mapping[Rectangle, Sequence[tuple[int, ShardSlice]]],
) -> Iterator[Overlap]:
    # a coordinate that keeps a region twice is in two entries
    regions: dict[tuple[Rectangle, int], tuple[dict[int, ShardSlice], dict[int, ShardSlice]]] = {}
    for wanted, receiving in destinations.items():
        covered = 0
        for rectangle, sending in sources.items():
            if (region := intersect(rectangle, wanted)) is None:
                continue
            covered += prod(region[1])
            senders = dict(reversed(sending))  # the first slice of a rank that has several
            for coordinate, part in receiving:
                entries = (
                    regions.setdefault((region, number), (senders, {}))[1] for number in count()
                )
                next(entry for entry in entries if coordinate not in entry)[coordinate] = part
        if covered != prod(wanted[1]):
            raise ValueError(
                f"{name}: the engine keeps {prod(wanted[1])} elements from {wanted[0]} of shape {wanted[1]}, "
                f"but the trainer holds {covered} of them"
            )
    for ((start, shape), _), (senders, receivers) in regions.items():
        yield Overlap(name, start, shape, dict(sorted(senders.items())), receivers)


def _split(overlaps: Sequence[Overlap], unit: int, max_numel: int) -> Iterator[TransferGroup]:
    if sum(overlap.numel for overlap in overlaps) <= max_numel:
        yield TransferGroup(tuple(overlaps), unit)
        return
    for overlap in overlaps:
        start, shape = overlap.start, overlap.shape
        rows = max(1, max_numel // max(1, prod(shape[1:])))
        for first in range(0, shape[0], rows):
            region = {
                "start": (start[0] + first, *start[1:]),
                "shape": (min(rows, shape[0] - first), *shape[1:]),
            }
            yield TransferGroup((replace(overlap, **region),), unit)


@dataclass(frozen=True, slots=True)
class Instances:
    """The instances of a transfer group, one for each layer and expert, as arrays."""

    layer: Ints
    expert: Ints  # -1: none
    position: (
        Ints  # number of the replica's elements before it, in the order of the engine's layers
    )
    rotation: Ints  # distinguishes instances with the same sources
    key: Ints  # row of `source_ranks`
    part: Ints  # expert-parallel rank of the engine that keeps it


class RecordedSlices:
    """Coordinates are ranks, each tensor is a layer; `destinations` are in the engine's order."""

    def __init__(
        self, sources: SlicesByRank, destinations: SlicesByRank, ranks_per_node: int, max_numel: int
    ) -> None:
        places = [
            (place, rank, part)
            for rank, slices in enumerate(destinations)
            for place, part in enumerate(slices)
        ]
        self.groups = transfer_groups(
            ((rank, part) for rank, slices in enumerate(sources) for part in slices),
            ((rank, part) for _, rank, part in sorted(places, key=lambda entry: entry[:2])),
            max_numel=max_numel,
        )
        self.world, self.ranks_per_node = max(len(sources), len(destinations)), ranks_per_node
        self.receivers = sorted({rank for _, rank, _ in places})
        self.lanes, self.period = (
            1,
            1,
        )  # layers at which ranks of one node start; they repeat after `period` ranks
        sizes = np.bincount(
            [group.unit for group in self.groups],
            [group.numel * len(group.destinations) for group in self.groups],
            1,
        ).astype(np.int64)
        self.layer_starts: Ints = np.cumsum(sizes) - sizes  # positions, ascending
        self.total = max(1, int(sizes.sum()))  # elements of a replica

    def instances(self, group: int) -> Instances:
        unit, zero = np.array([self.groups[group].unit]), np.zeros(1, dtype=np.int64)
        return Instances(unit, zero - 1, self.layer_starts[unit], zero, zero, zero)

    def source_ranks(self, group: int) -> Ints:
        """Returns the ranks that have the group, [keys, sources]."""
        return np.array([self.groups[group].sources])

    def destination_ranks(self, group: int, part: int) -> Sequence[int]:
        return self.groups[group].destinations

    def source(self, overlap: Overlap, rank: int, layer: int, expert: int) -> ShardSlice:
        return overlap.sources[rank]

    def destination(self, overlap: Overlap, rank: int, layer: int, expert: int) -> ShardSlice:
        return overlap.destinations[rank]


class FleetTables:
    """Coordinates are ranks along the axis that splits a tensor; sections are in engine order."""

    def __init__(
        self,
        shape: ModelShape,
        fleet: Fleet,
        table: Table,
        engine: Table,
        *,
        sizes: ElementSizes,
        max_numel: int,
    ) -> None:
        self.world, self.ranks_per_node = fleet.world, fleet.ranks_per_node
        self.receivers = list(range(fleet.first_receiver, fleet.first_receiver + fleet.receivers))
        # several lanes if a node has more ranks than a pipeline stage; ranks that relay to each other start together
        is_one_node, stage = (
            fleet.world <= fleet.ranks_per_node,
            fleet.trainers // fleet.parallel.pipeline,
        )
        self.period = min(
            fleet.ranks_per_node, fleet.receivers if is_one_node else fleet.ranks_per_replica
        )
        self.lanes = min(self.period, -(-min(fleet.ranks_per_node, fleet.receivers) // stage))
        self._shape, self._fleet, self._tables, self._element_sizes = (
            shape,
            fleet,
            (table, engine),
            sizes,
        )
        self._layouts = [fleet.trainer_layout(rank) for rank in range(fleet.trainers)]
        self._engines = [
            fleet.engine_layout(rank) for rank in self.receivers[: fleet.ranks_per_replica]
        ]
        layouts = {(layout.pp, layout.vpp): layout for layout in (*self._engines, *self._layouts)}
        self._chunks = {
            axes: stage_layers(shape.layers, layout) for axes, layout in layouts.items()
        }
        self._stage = np.zeros(
            shape.layers + 2, dtype=np.int64
        )  # of each layer; 0 for embedding and head
        for layout in self._layouts:
            for chunk in self._chunks[layout.pp, layout.vpp]:
                self._stage[chunk.start + 1 : chunk.stop + 1] = layout.pp.rank
        self._filled: dict[tuple[int, int, int, int], ShardSlice] = {}
        engine_etp = self._engines[0].etp.size
        self._sizes = {
            False: (fleet.parallel.tensor, fleet.tensor),
            True: (fleet.parallel.expert_tensor, engine_etp),
        }
        self._expert_numel: Counter[str] = (
            Counter()
        )  # of one expert, in each parameter on either side
        for one_side, size in zip(self._tables, self._sizes[True], strict=True):
            for part in (
                part for rank, part in self._templates(one_side.expert, size) if rank == 0
            ):
                self._expert_numel[part.param] += part.numel
        leading = shape.dense_layers
        layers = {
            "embedding": range(-1, 0),
            "dense": range(leading),
            "layer": range(leading, shape.layers),
        }
        layers["expert"] = layers["layer"] if shape.is_moe else range(0)
        self._layers = layers | {"head": range(shape.layers, shape.layers + 1)}
        by_section = {
            name: self._groups(name, max_numel) for name, numbers in self._layers.items() if numbers
        }
        self._sections = [name for name, groups in by_section.items() for _ in groups]
        self.groups = [group for groups in by_section.values() for group in groups]
        self._keys = self._trainer_keys()
        self._order_units()

    def _groups(self, section: str, max_numel: int) -> list[TransferGroup]:
        table, engine = self._tables
        is_expert = section == "expert"
        size, engine_size = self._sizes[is_expert]
        sources = list(self._templates(getattr(table, section), size))
        if (
            section == "embedding" and self._fleet.parallel.pipeline > 1
        ):  # the last stage has a copy if tied
            sources += [(size + rank, part) for rank, part in self._templates(table.tied, size)]
        destinations = self._templates(getattr(engine, section), engine_size)
        groups = transfer_groups(sources, destinations, max_numel=max_numel, is_expert=is_expert)
        if not is_expert:
            return groups
        # experts of the same ranks on both sides move together, as many as fit into a group
        per_rank = gcd(
            *(
                self._shape.experts // ranks
                for ranks in (self._fleet.parallel.expert, self._engines[0].ep.size)
            )
        )
        limit = max_numel // max(group.numel for group in groups)
        repeats = max(
            number
            for number in range(1, per_rank + 1)
            if per_rank % number == 0 and number <= max(1, limit)
        )
        return [replace(group, repeats=repeats) for group in groups]

    def _templates(self, rules: Sequence[Rule], size: int) -> Iterator[tuple[int, ShardSlice]]:
        for rank in range(size):
            slices = [part for rule in rules for part in rule.slices(Axis(size, rank))]
            for part in in_units(slices, self._element_sizes):
                yield rank, part

    def _trainer_keys(self) -> dict[str, tuple[Ints, Ints]]:
        """Section -> (key, coordinate) of each trainer rank; coordinate -1: the rank holds no part of the section."""
        stage, tp, ep, etp = (
            np.array([getattr(layout, axis).rank for layout in self._layouts])
            for axis in ("pp", "tp", "ep", "etp")
        )
        last, sizes = self._fleet.parallel.pipeline - 1, self._fleet.parallel
        copy = np.where((stage == last) & self._shape.tied, sizes.tensor + tp, -1)
        return {
            "embedding": (0 * stage, np.where(stage == 0, tp, copy)),
            "dense": (stage, tp),
            "layer": (stage, tp),
            "expert": (stage * sizes.expert + ep, etp),
            "head": (0 * stage, np.where(stage == last, tp, -1)),
        }

    def _order_units(self) -> None:
        """Sets the position of each layer, and of each unit in its layer: experts follow the other tensors."""
        units: Counter[tuple[str, int]] = (
            Counter()
        )  # elements; those of experts, in one of their groups
        for section, group in zip(self._sections, self.groups, strict=True):
            units[section, group.unit] += group.numel * len(group.destinations)
        ends = dict.fromkeys(self._layers, 0)
        self._units: dict[
            tuple[str, int], tuple[int, int]
        ] = {}  # (elements before the unit, elements of the unit)
        for (section, unit), size in units.items():
            self._units[section, unit] = ends["layer" if section == "expert" else section], size
            ends[section] += size
        ends["expert"] *= self._shape.experts // max(group.repeats for group in self.groups)
        numbers = range(EMBEDDING, self._shape.layers + 1)
        in_layer = [
            sum(ends[name] for name, layers in self._layers.items() if number in layers)
            for number in numbers
        ]
        sizes = np.array(in_layer)
        self.layer_starts: Ints = np.cumsum(sizes) - sizes
        self.total = int(sizes.sum())

    def instances(self, group: int) -> Instances:
        shape, section = self._shape, self._sections[group]
        begin, size = self._units[section, self.groups[group].unit]
        layer = np.array(self._layers[section])
        zeros = np.zeros_like(layer)
        if section != "expert":
            keys = self._stage[layer + 1]
            return Instances(
                layer, zeros - 1, self.layer_starts[layer + 1] + begin, layer, keys, zeros
            )
        repeats, ranks = self.groups[group].repeats, self._fleet.parallel.expert
        count, per_rank = shape.experts // repeats, shape.experts // repeats // ranks
        layer, number = np.repeat(layer, count), np.tile(np.arange(count), len(layer))
        # alternate between the expert-parallel ranks, so that all of them send
        place = number % per_rank * ranks + number // per_rank
        return Instances(
            layer,
            expert=number * repeats,
            position=self.layer_starts[layer + 1] + begin + place * size,
            rotation=layer + number % per_rank,
            key=self._stage[layer + 1] * ranks + number // per_rank,
            part=number // (count // self._engines[0].ep.size),
        )

    def source_ranks(self, group: int) -> Ints:
        keys, coordinates = self._keys[self._sections[group]]
        able = np.isin(coordinates, self.groups[group].sources)
        return np.stack(
            [np.flatnonzero(able & (keys == key)) for key in range(int(keys.max()) + 1)]
        )

    def destination_ranks(self, group: int, part: int) -> Sequence[int]:
        is_expert, wanted = self._sections[group] == "expert", self.groups[group].destinations
        is_kept = [
            layout.etp.rank in wanted and layout.ep.rank == part
            if is_expert
            else layout.tp.rank in wanted
            for layout in self._engines
        ]
        return [rank for index, rank in enumerate(self.receivers) if is_kept[index % len(is_kept)]]

    def source(self, overlap: Overlap, rank: int, layer: int, expert: int) -> ShardSlice:
        return self._fill(overlap.sources, self._layouts[rank], layer, expert)

    def destination(self, overlap: Overlap, rank: int, layer: int, expert: int) -> ShardSlice:
        layout = self._engines[(rank - self.receivers[0]) % len(self._engines)]
        return self._fill(overlap.destinations, layout, layer, expert)

    def _fill(
        self, parts: Mapping[int, ShardSlice], layout: Layout, layer: int, expert: int
    ) -> ShardSlice:
        """The slice of a rank's template for a global layer and expert."""
        coordinate = layout.etp.rank if expert >= 0 else layout.tp.rank
        if layer == EMBEDDING and not layout.pp.first:
            coordinate += layout.tp.size
        part = parts[coordinate]
        key = (id(part), layout.rank, layer, expert)
        if key not in self._filled:
            chunks = self._chunks[layout.pp, layout.vpp]
            ends = 0 if layer == EMBEDDING and layout.pp.first else -1  # embedding and head
            number = next((n for n, layers in enumerate(chunks) if layer in layers), ends)
            chunk = f"chunk{number % len(chunks)}." if len(chunks) > 1 else ""
            local = expert % (self._shape.experts // layout.ep.size) if expert >= 0 else -1
            if expert >= 0:
                part = of_expert(part, local, expert, self._expert_numel[part.param])
            param = part.param.format(layer=layer - chunks[number].start, expert=local)
            name = part.name.format(layer=layer, expert=expert)
            self._filled[key] = ShardSlice(
                name, part.start, part.shape, chunk + param, part.offset, part.strides
            )
        return self._filled[key]


Placement = FleetTables | RecordedSlices
