"""In which round each transfer runs, so that all links are busy all the time.

    layers of each pipeline stage, rows (group of replicas, layer, unit, bytes)  --assign_rounds-->  round of each row

A group of replicas takes one layer after another, always from the stage that fewest others read from at that moment,
so that all trainer GPUs send all the time. Where a group has more GPUs than a stage it takes layers of several stages
at once, its lanes: one stage alone could not fill its links. Within a layer, units go in order. Time is counted in
bytes that one GPU receives.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["EMBEDDING", "HEAD", "Rows", "assign_rounds"]

Ints = NDArray[np.int64]
Sizes = NDArray[np.float64]
EMBEDDING, HEAD = -2, -1  # layers that are none


@dataclass(frozen=True, slots=True)
class Rows:
    """What is to be ordered: arrays over rows."""

    group: Ints  # of replicas
    layer: Ints
    unit: Ints  # within the layer
    num_bytes: Ints


def assign_rounds(
    rows: Rows,
    layers_of_stages: list[list[int]],
    *,
    receivers: int,  # GPUs of a group
    senders: int,  # GPUs of a stage
    bucket_bytes: int,
) -> Ints:
    """[rows]. In a round a GPU receives `bucket_bytes`, give or take a unit: units are not cut."""
    units, groups = int(rows.unit.max()) + 1, int(rows.group.max()) + 1
    depth = max(layer for layers in layers_of_stages for layer in layers) + 3
    key = (rows.group * depth + rows.layer + 2) * units + rows.unit
    # [groups, layers + 2, units]: what one GPU receives of a unit, on average over its group
    sizes = np.bincount(key, weights=rows.num_bytes, minlength=groups * depth * units)
    sizes = sizes.reshape(groups, depth, units) / receivers
    lanes = min(len(layers_of_stages), -(-receivers // senders))
    starts = _starts(layers_of_stages, sizes.sum(2), lanes)
    # a unit stands where half of it has been sent: those of several lanes alternate
    middles = starts[:, :, None] + lanes * (np.cumsum(sizes, axis=2) - sizes / 2)
    return (middles // bucket_bytes).astype(np.int64).reshape(-1)[key]


def _starts(stages: list[list[int]], sizes: Sizes, lanes: int) -> Sizes:
    """[groups, layers + 2] when each group begins with each layer, by simulation."""
    starts = np.zeros(sizes.shape)
    waiting = [[list(layers) for layers in stages] for _ in sizes]
    left = np.array([[sizes[group, np.array(layers) + 2].sum() for layers in stages] for group in range(len(sizes))])
    reading = [0] * len(stages)  # lanes of all groups
    free: list[tuple[float, int, int, int]] = [
        (0.0, lane, group, -1) for lane in range(lanes) for group in range(len(sizes))
    ]
    heapq.heapify(free)
    while free:
        now, lane, group, before = heapq.heappop(free)
        if before >= 0:
            reading[before] -= 1
        able = [stage for stage, layers in enumerate(waiting[group]) if layers]
        if not able:
            continue
        stage = min(able, key=lambda stage: (reading[stage], -left[group, stage]))
        layer = waiting[group][stage].pop(0)
        size = sizes[group, layer + 2]
        starts[group, layer + 2] = now
        left[group, stage] -= size
        reading[stage] += 1
        heapq.heappush(free, (now + lanes * size, lane, group, stage))
    return starts
