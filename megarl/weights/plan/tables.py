"""A Placement: what moves in a sync, which trainer ranks have it and which engine ranks store it,
from the tables of trainer and engine, or from recorded slices.

TablePlacement: groups of templates, once for all layers and experts; a coordinate is a rank along
                the axis that splits the tensor:
                template, rank, layer, expert --slice_of--> ShardSlice
TracedPlacement: groups of the slices of every rank, for a family without a table; a coordinate is
                 a rank
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress, cycle, zip_longest
from math import gcd

import numpy as np
from numpy.typing import NDArray

from megarl.layout import Axis, Fleet, stage_layers
from megarl.models.shape import ModelShape
from megarl.models.shards import (
    ElementSizes,
    Rules,
    ShardSlice,
    Slices,
    Table,
    by_prefix,
    in_units,
    of_expert,
)
from megarl.weights.plan.groups import ByCoordinate, Located, TransferGroup, transfer_groups

Ints = NDArray[np.integer]
SlicesByRank = Sequence[Slices]
EMBEDDING = -1  # layer index of the embedding; the head's is `shape.layers`


def sums_at(index: Ints | list[int], numel: Ints | list[int], length: int) -> Ints:
    """Returns [length or more] int64: the sum of `numel` at each index."""
    return np.bincount(index, numel, length).astype(np.int64)


def by_replica(receivers: Sequence[int], ranks_per_replica: int) -> list[Sequence[int]]:
    starts = range(0, len(receivers), ranks_per_replica)
    return [receivers[first : first + ranks_per_replica] for first in starts]


def _unit_numel(groups: Sequence[TransferGroup]) -> Ints:
    """Returns [units]: the elements of each unit, summed over its destinations."""
    numel = [group.numel * len(group.destinations) for group in groups]
    return sums_at([group.unit for group in groups], numel, 1)


@dataclass(frozen=True)
class Instances:
    """The instances of a transfer group, one for each layer and expert, as arrays."""

    layer: Ints
    expert: Ints  # -1: none
    # elements of the replica before the instance, in the order of the engine's layers
    position: Ints
    rotation: Ints  # distinguishes instances with the same sources
    key: Ints  # row of `source_ranks`
    part: Ints  # expert-parallel rank of the engine that stores it


class TracedPlacement:
    """A Placement whose coordinates are ranks and whose layers are tensors. `destinations` are in
    the engine's order."""

    def __init__(
        self,
        sources: SlicesByRank,
        destinations: SlicesByRank,
        ranks_per_replica: int,
        ranks_per_node: int,
        max_numel: int,
    ) -> None:
        sent = []
        for rank, slices in enumerate(sources):
            sent += [(rank, part) for part in slices]
        kept = []
        for parts in zip_longest(*destinations):  # all first slices, then all second ones, ...
            kept += [(rank, part) for rank, part in enumerate(parts) if part]
        self.groups = transfer_groups(sent, kept, max_numel=max_numel)
        self.world = max(len(sources), len(destinations))
        self.ranks_per_node = ranks_per_node
        self.receivers = [rank for rank, slices in enumerate(destinations) if slices]
        self.replicas = by_replica(self.receivers, ranks_per_replica)
        self.is_spread = False  # neighbouring ranks start at different layers
        self.starts_per_node = 1  # number of layers at which ranks of one node start
        self.period = 1  # the starts repeat after `period` ranks
        sizes = _unit_numel(self.groups)
        self.layer_starts = np.cumsum(sizes) - sizes  # positions, ascending
        self.total = max(1, int(sizes.sum()))  # elements of a replica

    def instances(self, group: int) -> Instances:
        unit = np.array([self.groups[group].unit])
        zero = np.zeros(1, dtype=np.int64)
        return Instances(
            unit,
            zero - 1,
            self.layer_starts[unit],
            zero,
            zero,
            zero,
        )

    def source_ranks(self, group: int) -> Ints:
        """Returns the ranks that have the group, [keys, sources]."""
        return np.array([self.groups[group].sources])

    def destination_ranks(self, group: int, part: int) -> Sequence[int]:
        return self.groups[group].destinations

    def slice_of(
        self, parts: ByCoordinate, rank: int, layer: int, expert: int, *, is_source: bool
    ) -> ShardSlice:
        return parts[rank]


@dataclass(frozen=True)
class _Section:
    """The rules for tensors that repeat in `layers`, and the trainer's ranks that have them."""

    rules: tuple[Rules, ...]  # of the trainer and of the engine
    layers: Ints  # global, ascending
    key: Ints  # [trainer ranks]: row of `source_ranks`
    coordinate: Ints  # [trainer ranks]; -1: the rank has no part
    is_expert: bool = False


class TablePlacement:
    """A Placement whose coordinates are ranks along the axis that splits a tensor. Sections are in
    the engine's order."""

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
        self.world = fleet.world
        self.ranks_per_node = fleet.ranks_per_node
        first = fleet.first_receiver
        self.receivers = list(range(first, first + fleet.receivers))
        self.replicas = by_replica(self.receivers, fleet.ranks_per_replica)
        # several starts if a node has more ranks than a pipeline stage; ranks that relay to each
        # other start together
        self.period = min(fleet.ranks_per_node, fleet.ranks_per_replica)
        if fleet.world <= fleet.ranks_per_node:
            self.period = fleet.receivers
        stage = fleet.trainers // fleet.parallel.pipeline
        self.starts_per_node = min(
            self.period, -(-min(fleet.ranks_per_node, fleet.receivers) // stage)
        )
        # data ranks whose experts are on the same trainer ranks start apart
        self.is_spread = fleet.expert > fleet.tensor
        if self.is_spread:
            self.starts_per_node = min(self.period, -(-fleet.ranks_per_replica // stage))
        self._filled = {}  # cache of `slice_of`
        self._shape = shape
        self._fleet = fleet
        self._tables = (table, engine)
        self._element_sizes = sizes
        self._layouts = [fleet.trainer_layout(rank) for rank in range(fleet.trainers)]
        self._engines = list(map(fleet.engine_layout, self.replicas[0]))
        # pipeline stage of each layer; 0 for embedding and head
        self._stage = np.zeros(shape.layers + 2, dtype=np.int64)
        for layout in self._layouts:
            for chunk in stage_layers(shape.layers, layout):
                self._stage[chunk.start + 1 : chunk.stop + 1] = layout.pp.rank
        self._sizes = {
            False: (fleet.parallel.tensor, fleet.tensor),
            True: (fleet.parallel.expert_tensor, self._engines[0].etp.size),
        }
        # (layer kind, parameter of either side) -> elements of one expert
        self._expert_numel = Counter()
        self._add_groups(max_numel)

    def _add_groups(self, max_numel: int) -> None:
        """Sets the groups of all sections, and the positions of layers and of units in a layer.
        Experts follow the layer's other tensors."""
        self.groups: list[TransferGroup] = []
        # per group: its section, its instances in a layer, the elements of the layer before the
        # section and of the section before its unit, and the elements of all units (for experts, of
        # one group of experts)
        self._places = []
        sizes = np.zeros(self._shape.layers + 2, dtype=np.int64)  # per layer, embedding first
        for section in self._sections():
            groups = self._groups(section, max_numel)
            self.groups += groups
            count = self._shape.experts // groups[0].repeats if section.is_expert else 1
            numel = _unit_numel(groups)
            layers = section.layers + 1
            starts = np.cumsum(numel) - numel
            for group in groups:
                place = (section, count, sizes[layers[0]], starts[group.unit], numel.sum())
                self._places.append(place)
            # a rank receives its own part of the experts
            parts = self._engines[0].ep.size if section.is_expert else 1
            sizes[layers] += count // parts * numel.sum()
        self._layer_sizes = sizes
        self.layer_starts = np.cumsum(sizes) - sizes
        self.total = int(sizes.sum())

    def _sections(self) -> Iterator[_Section]:
        def ranks(axis: str) -> Ints:
            return np.array([getattr(layout, axis).rank for layout in self._layouts])

        stage = ranks("pp")
        tp = ranks("tp")
        sizes = self._fleet.parallel
        table, engine = self._tables
        is_last = stage == sizes.pipeline - 1
        copy = np.where(is_last & self._shape.tied, sizes.tensor + tp, -1)
        zeros = 0 * stage
        first = np.array([EMBEDDING])
        embedding = (table.embedding, engine.embedding)
        yield _Section(embedding, first, zeros, np.where(stage == 0, tp, copy))
        kinds = self._shape.layer_kinds
        for kind in dict.fromkeys(kinds):
            layers = np.flatnonzero([other == kind for other in kinds])
            both_sides = [side.rules_of(self._shape, layers[0]) for side in self._tables]
            rules, experts = zip(*both_sides, strict=True)
            yield _Section(rules, layers, stage, tp)
            if any(experts):
                key = stage * sizes.expert + ranks("ep")
                yield _Section(experts, layers, key, ranks("etp"), is_expert=True)
        last = first + len(kinds) + 1
        yield _Section((table.head, engine.head), last, zeros, np.where(is_last, tp, -1))

    def _groups(self, section: _Section, max_numel: int) -> list[TransferGroup]:
        is_expert = section.is_expert
        templates = map(self._templates, section.rules, self._sizes[is_expert])
        sources, destinations = map(list, templates)
        # the last stage has a copy of a tied embedding
        size = self._fleet.parallel.tensor
        if section.layers[0] == EMBEDDING and self._fleet.parallel.pipeline > 1:
            tied = self._tables[0].tied
            sources += [(size + rank, part) for rank, part in self._templates(tied, size)]
        groups = transfer_groups(sources, destinations, max_numel=max_numel, is_expert=is_expert)
        if not is_expert:
            return groups
        kind = self._shape.kind(section.layers[0])
        for rank, part in sources + destinations:
            if rank == 0:
                self._expert_numel[kind, part.param] += part.numel
        # experts of the same ranks on both sides move together, as many as fit into a group
        experts = self._shape.experts
        per_rank = gcd(experts // self._fleet.parallel.expert, experts // self._engines[0].ep.size)
        limit = max(1, max_numel // max(group.numel for group in groups))
        numbers = range(1, min(per_rank, limit) + 1)
        repeats = max(number for number in numbers if per_rank % number == 0)
        return [replace(group, repeats=repeats) for group in groups]

    def _templates(self, rules: Rules, size: int) -> Iterator[Located]:
        for rank in range(size):
            for rule in rules:
                for part in in_units(rule.slices(Axis(size, rank)), self._element_sizes):
                    yield rank, part

    def instances(self, group: int) -> Instances:
        """Returns the tensors of a group of templates, one for each layer (and expert).

        `number` counts the experts of a layer; of a tensor without experts there is one instance
        a layer, whose `expert` is -1.
        """
        section, count, first, start, numel = self._places[group]
        layer = np.repeat(section.layers, count)
        number = np.tile(np.arange(count), len(section.layers))
        expert = number - 1  # -1: no expert
        ranks = parts = 1  # expert-parallel sizes of trainer and engine
        if section.is_expert:
            expert = number * self.groups[group].repeats
            ranks = self._fleet.parallel.expert
            parts = self._engines[0].ep.size
        per_rank = count // ranks
        per_part = count // parts
        # alternate between the trainer's expert-parallel ranks, so that all of them send
        both = gcd(per_rank, per_part)
        place = number % both * (per_part // both) + number % per_part // both
        position = start + place * numel
        if self.is_spread:  # a layer's experts and its other tensors arrive side by side
            position = position * self._layer_sizes[layer + 1] // (per_part * numel)
        else:
            position += first
        return Instances(
            layer,
            expert,
            position=self.layer_starts[layer + 1] + position,
            rotation=layer + number % per_rank,
            key=self._stage[layer + 1] * ranks + number // per_rank,
            part=number // per_part,
        )

    def source_ranks(self, group: int) -> Ints:
        section = self._places[group][0]
        able = np.isin(section.coordinate, self.groups[group].sources)
        numbers = range(int(section.key.max()) + 1)
        return np.stack([np.flatnonzero(able & (section.key == number)) for number in numbers])

    def destination_ranks(self, group: int, part: int) -> Sequence[int]:
        wanted = self.groups[group].destinations
        if self._places[group][0].is_expert:
            is_kept = [x.etp.rank in wanted and x.ep.rank == part for x in self._engines]
        else:
            is_kept = [x.tp.rank in wanted for x in self._engines]
        return list(compress(self.receivers, cycle(is_kept)))

    def slice_of(
        self, parts: ByCoordinate, rank: int, layer: int, expert: int, *, is_source: bool
    ) -> ShardSlice:
        """Returns a rank's slice for a global layer and expert, filled in from its template.
        `is_source`: `rank` is a trainer rank."""
        layout = self._engines[(rank - self.receivers[0]) % len(self._engines)]
        if is_source:
            layout = self._layouts[rank]
        is_expert = expert >= 0
        coordinate = layout.tp.rank
        if is_expert:
            coordinate = layout.etp.rank
        elif layer == EMBEDDING and not layout.pp.first:  # the copy of a tied embedding
            coordinate += layout.tp.size
        part = parts[coordinate]
        key = (id(part), layout.rank, layer, expert)
        if key in self._filled:
            return self._filled[key]
        chunks = by_prefix(stage_layers(self._shape.layers, layout))
        prefixes = list(chunks)
        chunk = prefixes[-1]  # this chunk has the head, and the copy of a tied embedding
        if layer == EMBEDDING and layout.pp.first:
            chunk = prefixes[0]
        for prefix, layers in chunks.items():
            if layer in layers:
                chunk = prefix
        local = -1
        if is_expert:
            local = expert % (self._shape.experts // layout.ep.size)
            kind = self._shape.kind(layer)
            part = of_expert(part, local, expert, self._expert_numel[kind, part.param])
        param = part.param.format(layer=layer - chunks[chunk].start, expert=local)
        name = part.name.format(layer=layer, expert=expert)
        self._filled[key] = replace(part, name=name, param=chunk + param)
        return self._filled[key]


Placement = TablePlacement | TracedPlacement
