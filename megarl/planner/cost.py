"""What a plan costs on given links: bytes in and out of every GPU, messages, memory, time against the physical floor.

    Flows x Links --cost--> Cost

Time is that of the wire: rounds one after another, each as long as its busiest link, and a fixed time a message. What
the kernels that pack and unpack take is not in it, but for their memory traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megarl.weights.dealer import Ints
from megarl.weights.flows import Flows

__all__ = ["LINKS", "Cost", "Links", "cost"]

MESSAGE_S = 1e-5  # of a point-to-point message; assumed, as small NCCL messages take about that


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes a second of one GPU and direction, nominal; GB = 1e9."""

    network: float  # between nodes: one 400G InfiniBand card a GPU (NDR, ConnectX-7)
    nvlink: float  # within a node
    memory: float
    node: int = 8


LINKS = {
    "h100": Links(network=50e9, nvlink=450e9, memory=3.35e12),  # NVLink 4
    "h200": Links(network=50e9, nvlink=450e9, memory=4.8e12),
    "b200": Links(network=50e9, nvlink=900e9, memory=8.0e12),  # NVLink 5
}


@dataclass(frozen=True)
class Cost:
    """Of one sync. Arrays are over GPUs."""

    bytes_out: Ints
    bytes_in: Ints
    num_messages: int
    num_rounds: int
    bytes_kept: int
    bytes_received: int  # without what a GPU already holds
    bytes_forwarded: int  # of these, copied on within a node
    predicted_seconds: float
    floor_seconds: float
    busiest_link_over_mean: float
    largest_message_bytes: int
    peak_extra_bytes: int  # buckets and open layers
    staged_bytes: int  # beside them where sync.atomic, on the device or the host: all that a GPU receives


def cost(flows: Flows, links: Links, model_bytes: int) -> Cost:
    fleet, moved = flows.fleet, flows.source != flows.destination
    source, destination, size = flows.source[moved], flows.destination[moved], flows.num_bytes[moved]
    step, rounds, gpus = flows.round[moved], flows.num_rounds, fleet.gpus
    is_near = source // fleet.node == destination // fleet.node

    def per_gpu(ends: Ints, where: np.ndarray) -> np.ndarray:
        """[rounds, gpus] bytes"""
        key = step[where] * gpus + ends[where]
        return np.bincount(key, weights=size[where], minlength=rounds * gpus).reshape(rounds, gpus)

    far_out, far_in = per_gpu(source, ~is_near), per_gpu(destination, ~is_near)
    near_out, near_in = per_gpu(source, is_near), per_gpu(destination, is_near)
    pairs, of_pair = np.unique((step * gpus + source) * gpus + destination, return_inverse=True)
    messages = np.zeros((rounds, gpus))
    for ends in (pairs // gpus % gpus, pairs % gpus):
        np.add.at(messages, (pairs // gpus // gpus, ends), 1)
    seconds = np.maximum.reduce(
        [
            np.maximum(far_out, far_in) / links.network,
            np.maximum(near_out, near_in) / links.nvlink,
            2 * (far_out + far_in + near_out + near_in) / links.memory,  # packed or written: read once, written once
        ]
    ).max(1) + MESSAGE_S * messages.max(1)
    sent, received = (far_out + near_out).sum(0), (far_in + near_in).sum(0)
    buffers = np.maximum(far_out + near_out, far_in + near_in)  # [rounds, gpus]
    trainers, engines = slice(0, fleet.trainers), slice(fleet.first, fleet.first + fleet.receivers)
    is_first_hop = ~flows.is_relay[moved]
    egress = np.bincount(source[is_first_hop], weights=size[is_first_hop], minlength=gpus)[trainers]
    return Cost(
        bytes_out=sent.astype(np.int64),
        bytes_in=received.astype(np.int64),
        num_messages=len(pairs),
        num_rounds=rounds,
        bytes_kept=int(flows.num_bytes.sum()),
        bytes_received=int(size.sum()),
        bytes_forwarded=int(size[~is_first_hop].sum()),
        predicted_seconds=float(seconds.sum()),
        floor_seconds=floor(flows, links, model_bytes),
        busiest_link_over_mean=max(_over_mean(egress), _over_mean(received[engines])),
        largest_message_bytes=int(np.bincount(of_pair, weights=size).max(initial=0)),
        # two buffers of a round, one in flight and one being written, and the layers open meanwhile
        peak_extra_bytes=int(2 * buffers.max() + _open_bytes(flows)),
        staged_bytes=int(received.max()),
    )


def floor(flows: Flows, links: Links, model_bytes: int) -> float:
    """What no schedule beats: every engine GPU takes its share in, the trainers send every replica's copy out.

    Replicas that share a node share a copy.
    """
    fleet = flows.fleet
    wire = links.network if fleet.gpus > fleet.node else links.nvlink
    copies = min(fleet.replicas, -(-fleet.receivers // fleet.node))
    return max(
        model_bytes / fleet.replica_size / wire,
        copies * model_bytes / fleet.trainers / wire,
        2 * model_bytes / fleet.replica_size / links.memory,
    )


def _over_mean(values: np.ndarray) -> float:
    busy = values[values > 0]
    return float(busy.max() / busy.mean()) if len(busy) else 1.0


def _open_bytes(flows: Flows) -> int:
    """The most that layers take, on one GPU, between the first and the last round that writes to them."""
    gpus, depth = flows.fleet.gpus, int(flows.layer.max()) + 3
    key = (flows.layer + 2) * gpus + flows.destination
    size = np.bincount(key, weights=flows.num_bytes, minlength=depth * gpus)
    first, last = np.full(depth * gpus, flows.num_rounds), np.zeros(depth * gpus, dtype=np.int64)
    np.minimum.at(first, key, flows.round)
    np.maximum.at(last, key, flows.round)
    used = np.flatnonzero(size)
    change = np.zeros((flows.num_rounds + 1, gpus))
    np.add.at(change, (first[used], used % gpus), size[used])
    np.add.at(change, (last[used] + 1, used % gpus), -size[used])
    return int(change.cumsum(0).max())
