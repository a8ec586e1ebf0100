"""The weight tables of trainer and engine on the ranks of a fleet: what moves, who holds it, who keeps it.

table x table --transfer_groups--> groups of templates, once for all layers and experts alike
template, rank, layer, expert  --source | destination-->  ShardSlice
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megarl.layout import Axis, Layout, stage_layers
from megarl.models.engine import engine_table
from megarl.models.shape import ModelShape
from megarl.models.shards import Rule, ShardSlice, Table, of_expert
from megarl.weights.fleet import Fleet
from megarl.weights.fp32_views import view_fp32_as_16bit
from megarl.weights.transfer_groups import Overlap, TransferGroup, transfer_groups

__all__ = ["FleetTables", "Instances", "Ints"]

Ints = NDArray[np.integer]
EMBEDDING = -1  # as a layer; the head is layer `shape.layers`


@dataclass(frozen=True, slots=True)
class Instances:
    """The repetitions of a section, over its layers and their experts: arrays over them."""

    key: Ints  # which ranks hold it: those with this key
    layer: Ints
    expert: Ints  # -1: none
    local_expert: Ints  # on the ranks that hold it
    place: Ints  # among the experts of its layer
    part: Ints  # expert-parallel rank of the engine that keeps it


class FleetTables:
    """`groups` are in the order of sections; `sections` names the section of each."""

    def __init__(self, shape: ModelShape, fleet: Fleet, table: Table, *, itemsize: int, max_numel: int) -> None:
        self.shape, self.fleet, self._itemsize = shape, fleet, itemsize
        self._tables = (table, engine_table(shape))
        self._layouts = [fleet.trainer_layout(rank) for rank in range(fleet.trainers)]
        self._chunks = [stage_layers(shape.layers, layout) for layout in self._layouts]
        self._engine_layouts = [
            fleet.engine_layout(fleet.first_receiver + rank) for rank in range(fleet.ranks_per_replica)
        ]
        self._filled: dict[tuple[int, int, int, int], ShardSlice] = {}
        engine_etp = self._engine_layouts[0].etp.size
        self._sizes = {False: (fleet.parallel.tensor, fleet.tensor), True: (fleet.parallel.expert_tensor, engine_etp)}
        self._expert_numel: dict[str, int] = {}  # of one expert, in each parameter on either side
        for of_side, size in zip(self._tables, self._sizes[True], strict=True):
            for part in (part for rule in of_side.expert for part in rule.slices(Axis(size))):
                self._expert_numel[part.param] = self._expert_numel.get(part.param, 0) + part.numel
        names = ("embedding", "dense", "layer", "expert", "head")
        by_section = {name: self._groups(name, max_numel) for name in names if len(self.instances(name).layer)}
        self.sections = [name for name, groups in by_section.items() for _ in groups]
        self.groups = [group for groups in by_section.values() for group in groups]
        self._holding = self._trainer_keys()
        self._holders: dict[tuple[str, tuple[int, ...]], Ints] = {}

    def _groups(self, section: str, max_numel: int) -> list[TransferGroup]:
        table, engine = self._tables
        is_expert = section == "expert"
        size, engine_size = self._sizes[is_expert]
        sources = list(self._templates(getattr(table, section), size))
        if section == "embedding" and self.fleet.parallel.pipeline > 1:  # a tied one has a copy on the last stage
            sources += [(size + rank, part) for rank, part in self._templates(table.tied, size)]
        destinations = self._templates(getattr(engine, section), engine_size)
        return transfer_groups(sources, destinations, max_numel=max_numel, is_expert=is_expert)

    def _templates(self, rules: Sequence[Rule], size: int) -> Iterator[tuple[int, ShardSlice]]:
        for rank in range(size):
            slices = [part for rule in rules for part in rule.slices(Axis(size, rank))]
            for part in view_fp32_as_16bit(slices, self._tables[0].fp32, self._itemsize):
                yield rank, part

    def _trainer_keys(self) -> dict[str, tuple[Ints, Ints]]:
        """Section -> (key, coordinate) of each trainer; coordinate -1: holds nothing of it."""
        stage, tp, ep, etp = (
            np.array([getattr(layout, axis).rank for layout in self._layouts]) for axis in ("pp", "tp", "ep", "etp")
        )
        last, sizes = self.fleet.parallel.pipeline - 1, self.fleet.parallel
        copy = np.where((stage == last) & self.shape.tied, sizes.tensor + tp, -1)
        return {
            "embedding": (0 * stage, np.where(stage == 0, tp, copy)),
            "dense": (stage, tp),
            "layer": (stage, tp),
            "expert": (stage * sizes.expert + ep, etp),
            "head": (0 * stage, np.where(stage == last, tp, -1)),
        }

    def instances(self, section: str) -> Instances:
        shape, leading = self.shape, self.shape.dense_layers
        if section in ("embedding", "head"):
            layers = np.array([EMBEDDING if section == "embedding" else shape.layers])
        else:
            layers = np.arange(shape.layers)[:leading] if section == "dense" else np.arange(leading, shape.layers)
        zeros = np.zeros_like(layers)
        stage_of_layer = {
            number: layout.pp.rank
            for layout, chunks in zip(self._layouts, self._chunks, strict=True)
            for layers_ in chunks
            for number in layers_
        }
        stages = np.array([stage_of_layer.get(layer, 0) for layer in layers.tolist()], dtype=np.int64)
        if section != "expert":
            return Instances(stages, layers, zeros - 1, zeros, zeros, zeros)
        if not shape.is_moe:
            empty = zeros[:0]
            return Instances(empty, empty, empty, empty, empty, empty)
        ranks, parts = self.fleet.parallel.expert, self._engine_layouts[0].ep.size
        each = shape.experts // ranks
        expert = np.tile(np.arange(shape.experts), len(layers))
        # one expert of each expert-parallel rank after another, so that all of them send
        place = expert % each * ranks + expert // each
        key = np.repeat(stages * ranks, shape.experts) + expert // each
        return Instances(
            key, np.repeat(layers, shape.experts), expert, expert % each, place, expert // (shape.experts // parts)
        )

    def holders(self, section: str, group: TransferGroup) -> Ints:
        """[keys, holders] trainers that can send the group."""
        name = (section, group.sources)
        if name not in self._holders:
            keys, coordinates = self._holding[section]
            able = np.isin(coordinates, group.sources)
            ranks = [np.flatnonzero(able & (keys == key)) for key in range(int(keys.max()) + 1)]
            self._holders[name] = np.stack(ranks)
        return self._holders[name]

    def keepers(self, section: str, group: TransferGroup, part: int) -> list[int]:
        """Ranks that keep the group: of experts, those of the engine's expert-parallel rank `part`."""
        is_expert, first = section == "expert", self.fleet.first_receiver
        local = {
            rank
            for rank, layout in enumerate(self._engine_layouts)
            if (layout.etp if is_expert else layout.tp).rank in group.destinations
            and (not is_expert or layout.ep.rank == part)
        }
        return [first + rank for rank in range(self.fleet.receivers) if rank % self.fleet.ranks_per_replica in local]

    def source(self, overlap: Overlap, rank: int, layer: int, expert: int) -> ShardSlice:
        layout = self._layouts[rank]
        coordinate = layout.etp.rank if expert >= 0 else layout.tp.rank
        if layer == EMBEDDING and not layout.pp.first:
            coordinate += layout.tp.size
        return self._fill(overlap.sources[coordinate], layout, layer, expert)

    def destination(self, overlap: Overlap, rank: int, layer: int, expert: int) -> ShardSlice:
        layout = self._engine_layouts[(rank - self.fleet.first_receiver) % self.fleet.ranks_per_replica]
        coordinate = layout.etp.rank if expert >= 0 else layout.tp.rank
        return self._fill(overlap.destinations[coordinate], layout, layer, expert)

    def _fill(self, part: ShardSlice, layout: Layout, layer: int, expert: int) -> ShardSlice:
        """A template with its numbers filled in: of a global layer and expert."""
        key = (id(part), layout.rank, layer, expert)
        if key not in self._filled:
            chunks = stage_layers(self.shape.layers, layout)
            ends = 0 if layer == EMBEDDING and layout.pp.first else -1  # embedding and head
            number = next((n for n, layers in enumerate(chunks) if layer in layers), ends)
            chunk = f"chunk{number % len(chunks)}." if len(chunks) > 1 else ""
            local = expert % (self.shape.experts // layout.ep.size) if expert >= 0 else -1
            if expert >= 0:
                part = of_expert(part, local, expert, self._expert_numel[part.param])
            param = part.param.format(layer=layer - chunks[number].start, expert=local)
            self._filled[key] = replace(part, name=part.name.format(layer=layer, expert=expert), param=chunk + param)
        return self._filled[key]
