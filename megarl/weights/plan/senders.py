"""Assigns a sender to every transfer group, layer, expert and node.

A rank copies locally what it already has. It receives the rest from a rank on its node if possible,
otherwise over the network. Data that several ranks of a node lack crosses the network once: one of
these ranks receives it and relays it to the others. Senders take turns, and so do relaying ranks.

Every node goes through the model in layer order, but each starts at a different layer, so that all
pipeline stages send at all times: `position` counts from the layer where the receiver starts. If
engines have data ranks (`is_spread`), so do neighbouring ranks, whose experts are often on the same
trainer rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.weights.plan.tables import Ints, Placement


@dataclass(frozen=True)
class Hops:
    """First hops in order of `position`, and the relays that follow them. The `relay_*` arrays are
    [relays], all others are [hops]."""

    group: Ints
    layer: Ints
    expert: Ints
    sender: Ints
    receiver: Ints
    position: Ints  # counted from the layer where the receiver starts
    relay_hop: Ints  # index of the first hop, ascending
    relay_receiver: Ints


def assign_senders(placement: Placement) -> Hops:
    per_node = placement.ranks_per_node
    receivers = placement.receivers
    starts = placement.layer_starts
    nodes = list(_by_node(receivers, per_node))
    starts_per_node = placement.starts_per_node
    period = placement.period
    offsets = np.zeros(placement.world, dtype=np.int64)  # position where each rank starts
    for index, rank in enumerate(receivers):
        node = nodes.index(rank // per_node)
        start = node * starts_per_node + index % period * starts_per_node // period
        if placement.is_spread:
            start = index % starts_per_node * len(nodes) + node
        even = placement.total * start // (len(nodes) * starts_per_node)
        offsets[rank] = starts[np.searchsorted(starts, even, side="right") - 1]
    hops: list[Ints] = [np.zeros((6, 0), dtype=np.int64)]
    relays: list[Ints] = [np.zeros((2, 0), dtype=np.int64)]
    count = 0
    for columns, far, others in _hops(placement, nodes, offsets):
        hops.append(np.stack(columns))
        hop = np.repeat(count + far, len(others))
        relays.append(np.stack([hop, np.tile(others, len(far))]))
        count += len(columns[0])
    *columns, receiver, position = np.concatenate(hops, axis=1)
    position = (position - offsets[receiver]) % placement.total
    order = np.argsort(position, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    hop, relay_receiver = np.concatenate(relays, axis=1)
    hop = place[hop]
    by_hop = np.argsort(hop, kind="stable")
    return Hops(
        *(column[order].astype(np.int32) for column in (*columns, receiver)),
        position=position[order],
        relay_hop=hop[by_hop],
        relay_receiver=relay_receiver[by_hop].astype(np.int32),
    )


def _hops(
    placement: Placement, nodes: Sequence[int], offsets: Ints
) -> Iterator[tuple[tuple[Ints, ...], Ints, Ints]]:
    """Yields (columns of hops, indices of the hops that cross the network, ranks to which these are
    relayed)."""
    per_node = placement.ranks_per_node
    for number in range(len(placement.groups)):
        instances = placement.instances(number)
        all_sources = placement.source_ranks(number)
        for part in np.unique(instances.part).tolist():
            chosen = np.flatnonzero(instances.part == part)
            sources = all_sources[instances.key[chosen]]  # [instances, sources]
            ranks_by_node = _by_node(placement.destination_ranks(number, part), per_node)
            for node, receivers in ranks_by_node.items():
                # increments by instance, to alternate senders and relaying ranks
                rotation = instances.rotation[chosen] + number + nodes.index(node)
                ranks = np.array(receivers)
                # ranks that start together receive all parts of a tensor, in turn
                unit = instances.rotation[chosen] + placement.groups[number].unit
                starts = np.unique(offsets[ranks])
                first = np.zeros_like(rotation)
                for turn, start in enumerate(starts):
                    together = ranks[offsets[ranks] == start]
                    own = (unit + nodes.index(node)) % len(starts) == turn
                    first[own] = together[rotation[own] % len(together)]
                near = sources // per_node == node
                is_near = near.any(1)
                sender = _next_source(sources, near, rotation)
                for receiver in receivers:
                    direct = np.flatnonzero(is_near | (first == receiver))
                    is_local = (sources[direct] == receiver).any(1)
                    taken = chosen[direct]
                    same = np.zeros_like(direct)
                    columns = (
                        same + number,
                        instances.layer[taken],
                        instances.expert[taken],
                        np.where(is_local, receiver, sender[direct]),
                        same + receiver,
                        instances.position[taken],
                    )
                    yield columns, np.flatnonzero(~is_near[direct]), ranks[ranks != receiver]


def _next_source(sources: Ints, near: np.ndarray, rotation: Ints) -> Ints:
    """Returns [instances]: the next source in the rotation, on the same node if there is one.
    `sources` and `near` are [instances, sources]."""
    count = sources.shape[1]
    is_allowed = near | ~near.any(1, keepdims=True)
    order = np.where(is_allowed, (np.arange(count) - rotation[:, None]) % count, count)
    return np.take_along_axis(sources, order.argmin(1)[:, None], 1)[:, 0]


def _by_node(ranks: Sequence[int], ranks_per_node: int) -> dict[int, list[int]]:
    nodes = {}
    for rank in ranks:
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    return nodes
