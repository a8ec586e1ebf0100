"""Computes the cost of a plan on given links: bytes, messages, memory, time, and a lower bound on
the time.

    Plan x Fleet x Links --estimate_cost--> Cost

Rounds run one after another. Each takes as long as its busiest link, plus a time per message.
"""

from dataclasses import dataclass

import numpy as np

from megarl.layout import Fleet
from megarl.weights.plan.plan import Plan
from megarl.weights.plan.tables import Ints, sums_at

MESSAGE_S = 1e-5  # fixed time per point-to-point message; assumed, about that of a small NCCL one


@dataclass(frozen=True)
class Links:
    """Nominal bandwidth in bytes per second, per GPU and direction; 1 GB is 1e9 bytes."""

    nvlink: float  # within a node
    network: float = 50e9  # between nodes: one 400G InfiniBand card per GPU (NDR, ConnectX-7)


LINKS = {
    "h100": Links(450e9),  # NVLink 4
    "h200": Links(450e9),
    "b200": Links(900e9),  # NVLink 5
}


@dataclass(frozen=True)
class Cost:
    """The cost of one sync. Arrays have an entry per rank; local copies are not messages."""

    bytes_out: Ints
    bytes_in: Ints
    num_messages: int
    predicted_seconds: float
    transfer_seconds: float  # predicted_seconds without the time per message
    floor_seconds: float
    busiest_link_over_mean: float
    largest_message_bytes: int
    peak_extra_bytes: int  # peak of messages in flight plus peak of open tensors, on any rank
    staged_bytes: int  # with sync.atomic, in addition: the most bytes that a rank receives


def estimate_cost(plan: Plan, fleet: Fleet, links: Links) -> Cost:
    world = fleet.world
    node = fleet.ranks_per_node
    rounds = plan.num_rounds
    moved = plan.message_sender != plan.message_receiver
    number = plan.message_round[moved]
    size = plan.message_bytes[moved]
    ends = (plan.message_sender[moved], plan.message_receiver[moved])
    is_near = ends[0] // node == ends[1] // node

    def per_rank(rank: Ints, weights: Ints) -> Ints:
        """Returns [rounds, world]: the sum of `weights` per round and rank."""
        return sums_at(number * world + rank, weights, rounds * world).reshape(rounds, world)

    far = [per_rank(rank, np.where(is_near, 0, size)) for rank in ends]
    near = [per_rank(rank, np.where(is_near, size, 0)) for rank in ends]
    ones = np.ones_like(size)
    messages = per_rank(ends[0], ones) + per_rank(ends[1], ones)
    network_s = np.maximum(*far) / links.network
    nvlink_s = np.maximum(*near) / links.nvlink
    transfer = np.maximum(network_s, nvlink_s).max(1).sum()
    sent = far[0] + near[0]
    received = far[1] + near[1]
    bytes_in = received.sum(0)
    in_flight = sent + received
    in_flight[:-1] += sent[1:]  # messages of the next round are packed meanwhile
    rows = plan.rows
    direct = (rows.via < 0) & (rows.sender != rows.receiver)
    egress = np.bincount(rows.sender[direct], rows.numel[direct], world)
    latency = MESSAGE_S * np.max(messages, axis=1, initial=0).sum()
    # lower bound: each node receives the bytes that it lacks once, over its network cards; the
    # trainers send the bytes that all nodes lack; each GPU receives its bytes over NVLink
    nodes = np.arange(world) // node
    lacking = np.bincount(nodes, weights=far[1].sum(0))
    into_nodes = lacking / np.bincount(nodes) / links.network
    out_of_trainers = lacking.sum() / fleet.trainers / links.network
    return Cost(
        bytes_out=sent.sum(0),
        bytes_in=bytes_in,
        num_messages=len(size),
        predicted_seconds=float(transfer + latency),
        transfer_seconds=float(transfer),
        floor_seconds=float(max(into_nodes.max(), out_of_trainers, bytes_in.max() / links.nvlink)),
        busiest_link_over_mean=max(_over_mean(egress), _over_mean(bytes_in)),
        largest_message_bytes=int(size.max(initial=0)),
        peak_extra_bytes=int(in_flight.max(initial=0)) + _open_bytes(plan, world),
        staged_bytes=int(bytes_in.max()),
    )


def _over_mean(values: np.ndarray) -> float:
    busy = values[values > 0]
    if not len(busy):
        return 1.0
    return float(busy.max() / busy.mean())


def _open_bytes(plan: Plan, world: int) -> int:
    """Returns the peak bytes of open tensors on one rank. A tensor is open from the first round
    that writes to it to the last. A layer's experts count as one tensor."""
    rows = plan.rows
    units = np.array([group.unit for group in plan.placement.groups])
    num_units = int(units.max()) + 2
    unit = np.where(rows.expert < 0, units[rows.group], -1) + 1
    tensor = (rows.layer + 1) * num_units + unit
    key = tensor * world + rows.receiver
    keys = int(key.max(initial=-1)) + 1
    size = np.bincount(key, weights=rows.numel, minlength=keys) * plan.itemsize
    first = np.full(keys, plan.num_rounds)
    last = np.zeros(keys, dtype=np.int64)
    np.minimum.at(first, key, rows.round)
    np.maximum.at(last, key, rows.round)
    used = np.flatnonzero(size)
    rank = used % world
    change = np.zeros((plan.num_rounds + 1, world))
    np.add.at(change, (first[used], rank), size[used])
    np.add.at(change, (last[used] + 1, rank), -size[used])
    return int(change.cumsum(0).max())
