"""Who sends what to whom: a sender for every transfer group, layer, expert and node.

A rank takes from itself what it holds, else from a rank of its node that holds it, else over the network. What
several ranks of a node lack crosses the network once: one of them receives it and relays it to the others. Holders
take turns, and so do the ranks that relay.

Every node goes through the model in the order of its layers, but each begins elsewhere, so that at any time all
pipeline stages are read from: `position` counts from where the receiver begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megarl.layout import stage_layers
from megarl.models.shape import ModelShape
from megarl.weights.fleet import Fleet
from megarl.weights.transfer_groups import TransferGroup

__all__ = ["EMBEDDING", "Hops", "Ints", "assign_senders", "assign_table_senders"]

Ints = NDArray[np.integer]
EMBEDDING = -1  # as a layer; the head is layer `shape.layers`


@dataclass(frozen=True, slots=True)
class Hops:
    """First hops, in order of `position`, and the relays that follow them. Arrays over hops, and over relays."""

    group: Ints
    layer: Ints
    expert: Ints  # -1: none
    sender: Ints
    receiver: Ints
    position: Ints  # elements a replica takes before
    total: int  # elements of a replica
    relay_hop: Ints  # ascending
    relay_receiver: Ints


class _Hops:
    """Collects hops, one group and node at a time."""

    def __init__(self, ranks_per_node: int) -> None:
        self._ranks_per_node = ranks_per_node
        self._hops: list[tuple[Ints, ...]] = []
        self._relays: list[tuple[Ints, Ints]] = []
        self._count = 0

    def add(
        self,
        group: int,
        instances: tuple[Ints, Ints, Ints],  # layer, expert, position of each
        holders: Ints,  # [instances, holders]
        keepers: Sequence[int],  # on one node
        turn: Ints,  # [instances] whose turn it is to send and to relay
    ) -> None:
        count = holders.shape[1]
        near = holders // self._ranks_per_node == keepers[0] // self._ranks_per_node
        is_near, kept = near.any(1), np.array(keepers)
        # the next in turn, of those on the node where there are any
        order = np.where(near | ~is_near[:, None], (np.arange(count) - turn[:, None]) % count, count)
        sender = np.take_along_axis(holders, order.argmin(1)[:, None], 1)[:, 0]
        first = kept[turn % len(kept)]
        for keeper in keepers:
            direct = np.flatnonzero(is_near | (first == keeper))
            if len(direct):
                own = (holders[direct] == keeper).any(1)
                columns = (np.full(len(direct), group), *(column[direct] for column in instances))
                self._hops.append((*columns, np.where(own, keeper, sender[direct]), np.full(len(direct), keeper)))
            self._count += len(direct)
            rest = kept[kept != keeper]
            far = np.flatnonzero(~is_near[direct])
            if len(rest) and len(far):
                hops = self._count - len(direct) + far
                self._relays.append((np.repeat(hops, len(rest)), np.tile(rest, len(far))))

    def finish(self, offsets: Ints, total: int) -> Hops:
        """`offsets` [world]: the position at which each rank begins."""
        types = (np.int32, np.int32, np.int32, np.int64, np.int32, np.int32)
        group, layer, expert, position, sender, receiver = (
            np.concatenate([hops[column] for hops in self._hops]).astype(dtype) for column, dtype in enumerate(types)
        )
        self._hops.clear()
        position = (position - offsets[receiver]) % total
        order = np.argsort(position, kind="stable")
        place = np.empty(len(order), dtype=np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        relays = [
            np.concatenate([relay[column] for relay in self._relays] or [np.zeros(0, np.int64)]) for column in (0, 1)
        ]
        hop = place[relays[0]]
        by_hop = np.argsort(hop, kind="stable")
        columns = (column[order] for column in (group, layer, expert, sender, receiver, position))
        return Hops(*columns, total, hop[by_hop], relays[1][by_hop].astype(np.int32))


def assign_senders(groups: Sequence[TransferGroup], *, world: int, ranks_per_node: int) -> Hops:
    """Of recorded slices: coordinates are ranks, and a unit is both a tensor and a layer."""
    hops, sizes = _Hops(ranks_per_node), np.zeros(1 + max(group.unit for group in groups), dtype=np.int64)
    for group in groups:
        sizes[group.unit] += group.numel * len(group.destinations)
    starts = np.cumsum(sizes) - sizes
    for number, group in enumerate(groups):
        instance = (np.array([group.unit]), np.array([-1]), starts[[group.unit]])
        for node, keepers in _by_node(group.destinations, ranks_per_node).items():
            hops.add(number, instance, np.array([group.sources]), keepers, np.array([node + number]))
    receivers = sorted({rank for group in groups for rank in group.destinations})
    total = max(1, int(sizes.sum()))
    return hops.finish(_offsets(receivers, world, ranks_per_node, starts, total, lanes=1), total)


def assign_table_senders(shape: ModelShape, fleet: Fleet, sections: Mapping[str, Sequence[TransferGroup]]) -> Hops:
    """Group numbers count through all sections in order."""
    hops, turns = _Hops(fleet.ranks_per_node), _Sections(shape, fleet)
    nodes = sorted({rank // fleet.ranks_per_node for rank in turns.receivers.tolist()})
    starts, total = turns.place(sections)
    number = 0
    for name, groups in sections.items():
        keys, layers, experts, within, parts = turns.instances(name)
        for group in groups:
            base = starts[layers + 1] + turns.unit_start[name, group.unit]
            position = base + within * (turns.unit_size[name, group.unit] if name == "expert" else 0)
            for part in np.unique(parts).tolist():
                chosen = np.flatnonzero(parts == part)
                instances = (layers[chosen], experts[chosen], position[chosen])
                holders = turns.holders(name, group.sources)[keys[chosen]]
                keepers = turns.keepers(name, group.destinations, part)
                for node, ranks in _by_node(keepers, fleet.ranks_per_node).items():
                    turn = layers[chosen] + turns.local_expert(experts[chosen]) + number + nodes.index(node)
                    hops.add(number, instances, holders, ranks, turn)
            number += 1
    lanes = -(-min(fleet.ranks_per_node, fleet.receivers) * fleet.parallel.pipeline // fleet.trainers)
    offsets = _offsets(turns.receivers.tolist(), fleet.world, fleet.ranks_per_node, starts, total, lanes=lanes)
    return hops.finish(offsets, total)


class _Sections:
    """Who holds and who keeps, for each section of a table."""

    def __init__(self, shape: ModelShape, fleet: Fleet) -> None:
        layouts = [fleet.trainer_layout(rank) for rank in range(fleet.trainers)]
        stage, tensor = (np.array([getattr(at, axis).rank for at in layouts]) for axis in ("pp", "tp"))
        ep, etp = (np.array([getattr(at, axis).rank for at in layouts]) for axis in ("ep", "etp"))
        last = fleet.parallel.pipeline - 1
        self._fleet, self._shape = fleet, shape
        self._stage_of_layer = np.zeros(shape.layers, dtype=np.int64)
        for at in layouts:
            for layers in stage_layers(shape.layers, at):
                self._stage_of_layer[layers.start : layers.stop] = at.pp.rank
        is_tied = shape.tied and last > 0
        embedding = np.where(
            stage == 0, tensor, np.where(is_tied & (stage == last), fleet.parallel.tensor + tensor, -1)
        )
        zeros = np.zeros_like(stage)
        # section -> (key of the instances a rank holds, its coordinate) of each trainer
        self._trainers = {
            "embedding": (zeros, embedding),
            "dense": (stage, tensor),
            "layer": (stage, tensor),
            "expert": (stage * fleet.parallel.expert + ep, etp),
            "head": (zeros, np.where(stage == last, tensor, -1)),
        }
        self.receivers = fleet.first_receiver + np.arange(fleet.receivers)
        engines = [fleet.engine_layout(rank) for rank in self.receivers.tolist()]
        self._engine_tp, self._engine_ep, self._engine_etp = (
            np.array([getattr(at, axis).rank for at in engines]) for axis in ("tp", "ep", "etp")
        )
        self._parts = engines[0].ep.size
        self.unit_start: dict[tuple[str, int], int] = {}
        self.unit_size: dict[tuple[str, int], int] = {}
        self._holders: dict[tuple[str, tuple[int, ...]], Ints] = {}

    def local_expert(self, expert: Ints) -> Ints:
        return np.maximum(expert, 0) % max(1, self._shape.experts // self._fleet.parallel.expert)

    def instances(self, section: str) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Of every repetition of a section: key, layer, expert, its place among the layer's experts, engine's part."""
        shape, leading = self._shape, self._shape.dense_layers
        numbers = {"embedding": [EMBEDDING], "head": [shape.layers], "dense": range(leading)}
        layers = np.array(numbers.get(section, range(leading, shape.layers)), dtype=np.int64)
        zeros = np.zeros_like(layers)
        if section in ("embedding", "head"):
            return zeros, layers, zeros - 1, zeros, zeros
        stages = self._stage_of_layer[layers]
        if section != "expert":
            return stages, layers, zeros - 1, zeros, zeros
        ranks, each = self._fleet.parallel.expert, shape.experts // self._fleet.parallel.expert
        expert = np.tile(np.arange(shape.experts), len(layers))
        # one expert of each expert-parallel rank after another, so that all of them send
        place = expert % each * ranks + expert // each
        keys = np.repeat(stages * ranks, shape.experts) + expert // each
        return keys, np.repeat(layers, shape.experts), expert, place, expert // (shape.experts // self._parts)

    def holders(self, section: str, coordinates: tuple[int, ...]) -> Ints:
        """[keys, holders]"""
        if (section, coordinates) not in self._holders:
            keys, at = self._trainers[section]
            able = np.isin(at, coordinates)
            ranks = [np.flatnonzero(able & (keys == key)) for key in range(int(keys.max()) + 1)]
            self._holders[section, coordinates] = np.stack(ranks)
        return self._holders[section, coordinates]

    def keepers(self, section: str, coordinates: tuple[int, ...], part: int) -> list[int]:
        is_kept = np.isin(self._engine_tp, coordinates)
        if section == "expert":
            is_kept = np.isin(self._engine_etp, coordinates) & (self._engine_ep == part)
        return self.receivers[is_kept].tolist()

    def place(self, sections: Mapping[str, Sequence[TransferGroup]]) -> tuple[Ints, int]:
        """Units one after another: ([layers + 2] where each layer begins, from the embedding on, and the total)."""
        sizes = np.zeros(self._shape.layers + 2, dtype=np.int64)
        ends: dict[str, int] = {}
        for name, groups in sections.items():
            begin = ends.get("layer", 0) if name == "expert" else 0
            units: dict[int, int] = {}
            for group in groups:
                units[group.unit] = units.get(group.unit, 0) + group.numel * len(group.destinations)
            repeated = self._shape.experts if name == "expert" else 1
            for unit, size in units.items():
                self.unit_start[name, unit], self.unit_size[name, unit] = begin, size
                begin += size * repeated
            ends[name] = begin
            layers = np.unique(self.instances(name)[1])
            sizes[layers + 1] = begin
        return np.cumsum(sizes) - sizes, int(sizes.sum())


def _by_node(ranks: Sequence[int], ranks_per_node: int) -> dict[int, list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    return nodes


def _offsets(
    receivers: Sequence[int], world: int, ranks_per_node: int, starts: Ints, total: int, *, lanes: int
) -> Ints:
    """[world] Where each receiver begins: at layers that lie evenly apart, one node after another.

    `lanes`: ranks of one node begin in so many places, where a node has more ranks than a pipeline stage.
    """
    offsets = np.zeros(world, dtype=np.int64)
    nodes = _by_node(receivers, ranks_per_node)
    for number, ranks in enumerate(nodes.values()):
        for index, rank in enumerate(ranks):
            lane = number * lanes + index * lanes // len(ranks)
            even = total * lane // (len(nodes) * lanes)
            offsets[rank] = starts[np.searchsorted(starts, even, side="right") - 1]
    return offsets
