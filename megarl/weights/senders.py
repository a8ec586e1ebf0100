"""Assigns a sender to every transfer group, layer, expert and node.

A rank copies locally what it already has. It receives the rest from a rank of its node if one has it, otherwise over
the network. Data that several ranks of a node lack crosses the network once: one of them receives it and relays it to
the others. Sources take turns, and so do the ranks that relay.

Every node goes through the model in layer order, but each starts at a different layer, so that all pipeline stages
send at all times: `position` counts from the layer where the receiver starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Instances:
    """The instances of a transfer group, one for each layer and expert, as arrays."""

    layer: Ints
    expert: Ints  # -1: none
    position: Ints  # number of the replica's elements before it, in the order of the engine's layers
    rotation: Ints  # distinguishes instances with the same sources
    key: Ints  # row of `Placement.source_ranks`
    part: Ints  # expert-parallel rank of the engine that keeps it


class Placement(Protocol):
    """What moves, which ranks hold it and which keep it. Groups are given by their index in `groups`."""

    world: int
    ranks_per_node: int
    receivers: list[int]  # ascending
    lanes: int  # number of layers at which ranks of one node start; they repeat after `period` ranks
    period: int
    layer_starts: Ints  # positions, ascending
    total: int  # elements of a replica

    @property
    def groups(self) -> Sequence[object]: ...
    def instances(self, group: int) -> Instances: ...
    def source_ranks(self, group: int) -> Ints:
        """Returns the ranks that have the group, [keys, sources]."""
        ...

    def destination_ranks(self, group: int, part: int) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Hops:
    """First hops, in order of `position`, and the relays that follow them. Arrays over hops, and over relays."""

    group: Ints
    layer: Ints
    expert: Ints
    sender: Ints
    receiver: Ints
    position: Ints  # counted from the layer where the receiver starts
    relay_hop: Ints  # index of the first hop, ascending
    relay_receiver: Ints


def assign_senders(placement: Placement) -> Hops:
    per_node, receivers = placement.ranks_per_node, placement.receivers
    nodes = list(_by_node(receivers, per_node))
    collector = _Collector(per_node)
    for number in range(len(placement.groups)):
        instances, sources = placement.instances(number), placement.source_ranks(number)
        for part in np.unique(instances.part).tolist():
            chosen = np.flatnonzero(instances.part == part)
            columns = (instances.layer[chosen], instances.expert[chosen], instances.position[chosen])
            for node, receiving in _by_node(placement.destination_ranks(number, part), per_node).items():
                rotation = instances.rotation[chosen] + number + nodes.index(node)
                collector.add(number, columns, sources[instances.key[chosen]], receiving, rotation)
    offsets, starts = np.zeros(placement.world, dtype=np.int64), placement.layer_starts
    lanes, period = placement.lanes, placement.period
    for index, rank in enumerate(receivers):
        lane = nodes.index(rank // per_node) * lanes + index % period * lanes // period
        even = placement.total * lane // (len(nodes) * lanes)
        offsets[rank] = starts[np.searchsorted(starts, even, side="right") - 1]
    return collector.finish(offsets, placement.total)


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
        sources: Ints,  # [instances, sources]
        receivers: Sequence[int],  # on one node
        rotation: Ints,  # [instances] counts up, to alternate senders and relaying ranks
    ) -> None:
        count, ranks = sources.shape[1], np.array(receivers)
        near = sources // self._ranks_per_node == receivers[0] // self._ranks_per_node
        is_near, first = near.any(1), ranks[rotation % len(ranks)]
        # the next source in the rotation, on the same node if possible
        order = np.where(near | ~is_near[:, None], (np.arange(count) - rotation[:, None]) % count, count)
        sender = np.take_along_axis(sources, order.argmin(1)[:, None], 1)[:, 0]
        for receiver in receivers:
            direct = np.flatnonzero(is_near | (first == receiver))
            is_local = (sources[direct] == receiver).any(1)
            columns = (np.full(len(direct), group), *(column[direct] for column in instances))
            self._hops.append((*columns, np.where(is_local, receiver, sender[direct]), np.full(len(direct), receiver)))
            far, others = np.flatnonzero(~is_near[direct]), ranks[ranks != receiver]
            self._relays.append((np.repeat(self._count + far, len(others)), np.tile(others, len(far))))
            self._count += len(direct)

    def finish(self, offsets: Ints, total: int) -> Hops:
        """`offsets` [world]: the position where each rank starts."""
        group, layer, expert, position, sender, receiver = (_joined(self._hops, column) for column in range(6))
        position = (position - offsets[receiver]) % total
        order = np.argsort(position, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        hop, relay_receiver = place[_joined(self._relays, 0)], _joined(self._relays, 1)
        by_hop = np.argsort(hop, kind="stable")
        group, layer, expert, sender, receiver = (
            column[order].astype(np.int32) for column in (group, layer, expert, sender, receiver)
        )
        relays = hop[by_hop], relay_receiver[by_hop].astype(np.int32)
        return Hops(group, layer, expert, sender, receiver, position[order], *relays)


def _joined(parts: list[tuple[Ints, ...]], column: int) -> Ints:
    return np.concatenate([np.zeros(0, dtype=np.int64), *(part[column] for part in parts)])
