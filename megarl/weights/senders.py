"""Who sends what to whom: a sender for every transfer group, layer, expert and node.

A rank takes from itself what it holds, else from a rank of its node that holds it, else over the network. What
several ranks of a node lack crosses the network once: one of them receives it and relays it to the others. Holders
take turns, and so do the ranks that relay.

Every node goes through the model in the order of its layers, but each begins elsewhere, so that at any time all
pipeline stages are read from: `position` counts from where the receiver begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.weights.fleet_tables import FleetTables, Ints
from megarl.weights.transfer_groups import TransferGroup

__all__ = ["Hops", "assign_senders", "assign_table_senders"]


@dataclass(frozen=True, slots=True)
class Hops:
    """First hops, in order of `position`, and the relays that follow them. Arrays over hops, and over relays."""

    group: Ints
    layer: Ints
    expert: Ints  # -1: none
    sender: Ints
    receiver: Ints
    position: Ints  # elements that a replica receives before it
    total: int  # elements of a replica
    relay_hop: Ints  # ascending
    relay_receiver: Ints


def assign_senders(groups: Sequence[TransferGroup], *, world: int, ranks_per_node: int) -> Hops:
    """For recorded slices: coordinates are ranks, and each tensor counts as a layer."""
    collector, sizes = _Collector(ranks_per_node), np.zeros(1 + max(group.unit for group in groups), dtype=np.int64)
    for group in groups:
        sizes[group.unit] += group.numel * len(group.destinations)
    starts = np.cumsum(sizes) - sizes
    for number, group in enumerate(groups):
        instance = (np.array([group.unit]), np.array([-1]), starts[[group.unit]])
        for node, keepers in _by_node(group.destinations, ranks_per_node).items():
            collector.add(number, instance, np.array([group.sources]), keepers, np.array([node + number]))
    receivers = sorted({rank for group in groups for rank in group.destinations})
    offsets, total = np.zeros(world, dtype=np.int64), max(1, int(sizes.sum()))
    nodes = _by_node(receivers, ranks_per_node)
    for number, ranks in enumerate(nodes.values()):
        offsets[ranks] = _layer_start(starts, total * number // len(nodes))
    return collector.finish(offsets, total)


def assign_table_senders(tables: FleetTables) -> Hops:
    fleet = tables.fleet
    collector, per_node = _Collector(fleet.ranks_per_node), fleet.ranks_per_node
    receivers = range(fleet.first_receiver, fleet.first_receiver + fleet.receivers)
    nodes = list(_by_node(receivers, per_node))
    instances = {section: tables.instances(section) for section in dict.fromkeys(tables.sections)}
    begins, starts, total = _positions(tables)
    for number, (section, group) in enumerate(zip(tables.sections, tables.groups, strict=True)):
        of = instances[section]
        begin, size = begins[section, group.unit]
        position = starts[of.layer + 1] + begin + of.place * size
        for part in np.unique(of.part).tolist():
            chosen = np.flatnonzero(of.part == part)
            columns = (of.layer[chosen], of.expert[chosen], position[chosen])
            holders = tables.holders(section, group)[of.key[chosen]]
            for node, keepers in _by_node(tables.keepers(section, group, part), per_node).items():
                turn = of.layer[chosen] + of.local_expert[chosen] + number + nodes.index(node)
                collector.add(number, columns, holders, keepers, turn)
    # the ranks of a node begin in several places where they are more than a pipeline stage has
    period = min(per_node, fleet.receivers if len(nodes) == 1 else fleet.ranks_per_replica)  # relays cross no lanes
    lanes = min(period, -(-min(per_node, fleet.receivers) * fleet.parallel.pipeline // fleet.trainers))
    offsets = np.zeros(fleet.world, dtype=np.int64)
    for rank in receivers:
        lane = nodes.index(rank // per_node) * lanes + (rank - fleet.first_receiver) % period * lanes // period
        offsets[rank] = _layer_start(starts, total * lane // (len(nodes) * lanes))
    return collector.finish(offsets, total)


def _positions(tables: FleetTables) -> tuple[dict[tuple[str, int], tuple[int, int]], Ints, int]:
    """(section, unit) -> (elements before it in its layer, its size); [layers + 2] elements before each layer, from the
    embedding to the head; elements in all. Experts follow the other tensors of their layer."""
    units: dict[tuple[str, int], int] = {}
    for section, group in zip(tables.sections, tables.groups, strict=True):
        units[section, group.unit] = units.get((section, group.unit), 0) + group.numel * len(group.destinations)
    begins: dict[tuple[str, int], tuple[int, int]] = {}
    ends: dict[str, int] = {}
    sizes = np.zeros(tables.shape.layers + 2, dtype=np.int64)
    for (section, unit), size in units.items():
        begin = ends.get(section, ends.get("layer", 0) if section == "expert" else 0)
        begins[section, unit] = begin, size
        ends[section] = begin + size * (tables.shape.experts if section == "expert" else 1)
        sizes[tables.instances(section).layer + 1] = ends[section]
    return begins, np.cumsum(sizes) - sizes, int(sizes.sum())


def _layer_start(starts: Ints, position: int) -> int:
    return int(starts[np.searchsorted(starts, position, side="right") - 1])


def _by_node(ranks: Sequence[int], ranks_per_node: int) -> dict[int, list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    return nodes


class _Collector:
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
        count, kept = holders.shape[1], np.array(keepers)
        near = holders // self._ranks_per_node == keepers[0] // self._ranks_per_node
        is_near, first = near.any(1), kept[turn % len(kept)]
        # the next in turn, of those on the node where there are any
        order = np.where(near | ~is_near[:, None], (np.arange(count) - turn[:, None]) % count, count)
        sender = np.take_along_axis(holders, order.argmin(1)[:, None], 1)[:, 0]
        for keeper in keepers:
            direct = np.flatnonzero(is_near | (first == keeper))
            own = (holders[direct] == keeper).any(1)
            columns = (np.full(len(direct), group), *(column[direct] for column in instances))
            self._hops.append((*columns, np.where(own, keeper, sender[direct]), np.full(len(direct), keeper)))
            far, others = np.flatnonzero(~is_near[direct]), kept[kept != keeper]
            self._relays.append((np.repeat(self._count + far, len(others)), np.tile(others, len(far))))
            self._count += len(direct)

    def finish(self, offsets: Ints, total: int) -> Hops:
        """`offsets` [world]: the position at which each rank begins."""
        group, layer, expert, position, sender, receiver = (_joined(self._hops, column) for column in range(6))
        position = (position - offsets[receiver]) % total
        order = np.argsort(position, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        hop, relay_receiver = place[_joined(self._relays, 0)], _joined(self._relays, 1)
        by_hop = np.argsort(hop, kind="stable")
        columns = (column[order].astype(np.int32) for column in (group, layer, expert, sender, receiver))
        return Hops(*columns, position[order], total, hop[by_hop], relay_receiver[by_hop].astype(np.int32))


def _joined(parts: list[tuple[Ints, ...]], column: int) -> Ints:
    return np.concatenate([part[column] for part in parts])
