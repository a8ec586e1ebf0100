"""Computes the cost of a plan on given links: bytes, messages, memory, time, and a lower bound on the time.

    Plan x Fleet x Links --estimate_cost--> Cost

Rounds run one after another, each as long as its busiest link, with a fixed time per message.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megarl.weights.fleet import Fleet
from megarl.weights.placements import Ints
from megarl.weights.plan import Plan

MESSAGE_S = 1e-5  # per point-to-point message; assumed, about the time of a small NCCL message


@dataclass(frozen=True, slots=True)
class Links:
    """Nominal bytes per second, per GPU and direction; GB = 1e9."""

    network: float  # between nodes: one 400G InfiniBand card per GPU (NDR, ConnectX-7)
    nvlink: float  # within a node


LINKS = {
    "h100": Links(network=50e9, nvlink=450e9),  # NVLink 4
    "h200": Links(network=50e9, nvlink=450e9),
    "b200": Links(network=50e9, nvlink=900e9),  # NVLink 5
}


@dataclass(frozen=True)
class Cost:
    """The cost of one sync. Arrays are over ranks; messages are those between ranks."""

    bytes_out: Ints
    bytes_in: Ints
    num_messages: int
    predicted_seconds: float
    transfer_seconds: float  # predicted_seconds without the time per message
    floor_seconds: float
    busiest_link_over_mean: float
    largest_message_bytes: int
    peak_extra_bytes: int  # messages in flight and open layers, on one rank
    staged_bytes: int  # additional bytes with sync.atomic, on the device or the host: all that a rank receives


def estimate_cost(plan: Plan, fleet: Fleet, links: Links) -> Cost:
    world, node, rounds = fleet.world, fleet.ranks_per_node, plan.num_rounds
    moved = plan.message_sender != plan.message_receiver
    number, size = plan.message_round[moved], plan.message_bytes[moved]
    ends = plan.message_sender[moved], plan.message_receiver[moved]
    is_near = ends[0] // node == ends[1] // node

    def per_rank(rank: Ints, weights: Ints | None) -> Ints:
        """Sums `weights` to [rounds, world]."""
        counts = np.bincount(number * world + rank, weights=weights, minlength=rounds * world)
        return counts.astype(np.int64).reshape(rounds, world)

    far = [per_rank(rank, np.where(is_near, 0, size)) for rank in ends]
    near = [per_rank(rank, np.where(is_near, size, 0)) for rank in ends]
    messages = sum(per_rank(rank, None) for rank in ends)
    transfer = (
        np.maximum(np.maximum(*far) / links.network, np.maximum(*near) / links.nvlink).max(1).sum()
    )
    sent, received = far[0] + near[0], far[1] + near[1]
    in_flight = sent + received
    in_flight[:-1] += sent[1:]  # the next round's are packed meanwhile
    direct = (plan.rows.via < 0) & (plan.rows.sender != plan.rows.receiver)
    egress = np.bincount(plan.rows.sender[direct], plan.rows.numel[direct], world)
    return Cost(
        bytes_out=sent.sum(0),
        bytes_in=received.sum(0),
        num_messages=len(size),
        predicted_seconds=float(transfer + MESSAGE_S * np.max(messages, axis=1, initial=0).sum()),
        transfer_seconds=float(transfer),
        floor_seconds=_floor(far[1].sum(0), received.sum(0), fleet, links),
        busiest_link_over_mean=max(_over_mean(egress), _over_mean(received.sum(0))),
        largest_message_bytes=int(size.max(initial=0)),
        peak_extra_bytes=int(in_flight.max(initial=0)) + _open_bytes(plan, world),
        staged_bytes=int(received.sum(0).max()),
    )


def _floor(far: Ints, received: Ints, fleet: Fleet, links: Links) -> float:
    """Lower bound on the time in seconds. `far` [world]: bytes received over the network, each once per node."""
    nodes = np.arange(fleet.world) // fleet.ranks_per_node
    lacking = np.bincount(nodes, weights=far)
    into_nodes = lacking / np.bincount(nodes) / links.network
    return float(
        max(
            into_nodes.max(),
            lacking.sum() / fleet.trainers / links.network,
            received.max() / links.nvlink,
        )
    )


def _over_mean(values: np.ndarray) -> float:
    busy = values[values > 0]
    return float(busy.max() / busy.mean()) if len(busy) else 1.0


def _open_bytes(plan: Plan, world: int) -> int:
    """Peak bytes on one rank of open tensors, from the first round that writes to a tensor to the last. A layer's
    experts count as one tensor."""
    rows = plan.rows
    units = np.array([group.unit for group in plan.placement.groups])
    unit = np.where(rows.expert < 0, units[rows.group], -1) + 1
    key = ((rows.layer + 1) * (int(units.max()) + 2) + unit) * world + rows.receiver
    keys = int(key.max(initial=-1)) + 1
    size = np.bincount(key, weights=rows.numel, minlength=keys) * plan.itemsize
    first, last = np.full(keys, plan.num_rounds), np.zeros(keys, dtype=np.int64)
    np.minimum.at(first, key, rows.round)
    np.maximum.at(last, key, rows.round)
    used = np.flatnonzero(size)
    change = np.zeros((plan.num_rounds + 1, world))
    np.add.at(change, (first[used], used % world), size[used])
    np.add.at(change, (last[used] + 1, used % world), -size[used])
    return int(change.cumsum(0).max())
