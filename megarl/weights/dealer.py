"""Who sends what to whom: the GPUs of both sides, and for every bundle, layer, expert and node a source.

A GPU takes from itself what it holds, else from a GPU of its node that holds it, else over the network from the least
busy holder. What several GPUs of a node keep crosses the network once and is copied on within the node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megarl.layout import Layout, Parallel, stage_layers
from megarl.models.engine import engine_layout
from megarl.models.shape import ModelShape
from megarl.weights.cuts import Bundle
from megarl.weights.order import EMBEDDING, HEAD

__all__ = ["Dealer", "Fleet", "Ints", "engine_layout_of"]

Ints = NDArray[np.int64]
COLUMNS = ("bundle", "layer", "expert", "source", "destination", "is_relay")


@dataclass(frozen=True, slots=True)
class Fleet:
    """Who sends and who receives. GPUs are numbered node by node; a trainer's rank is its GPU."""

    parallel: Parallel
    trainers: int
    tensor: int  # of an engine replica
    replicas: int
    expert: int = 1  # of an engine replica: expert parallelism over its data x tensor ranks
    node: int = 8  # GPUs of a node
    is_split: bool = True  # engines on GPUs of their own; else rank r of the engines is GPU r

    @property
    def replica_size(self) -> int:
        return max(self.tensor, self.expert)

    @property
    def receivers(self) -> int:
        return self.replicas * self.replica_size

    @property
    def first(self) -> int:
        """GPU of the engines' first rank: on a node of its own."""
        return -(-self.trainers // self.node) * self.node if self.is_split else 0

    @property
    def gpus(self) -> int:
        return max(self.trainers, self.first + self.receivers)

    def source(self, rank: int) -> Layout:
        return Layout.of(self.parallel, self.trainers, rank)


def engine_layout_of(fleet: Fleet, rank: int) -> Layout:
    return engine_layout(tensor=fleet.tensor, expert=fleet.expert, rank=rank % fleet.replica_size)


class Dealer:
    """Collects rows, a bundle after the other."""

    def __init__(self, shape: ModelShape, fleet: Fleet) -> None:
        self._shape, self._fleet = shape, fleet
        sizes = fleet.parallel
        stages: list[list[int]] = [[] for _ in range(sizes.pipeline)]
        self._dense: dict[tuple[int, int], list[int]] = defaultdict(list)  # (stage, coordinate) -> ranks
        self._sparse: dict[tuple[int, int, int], list[int]] = defaultdict(list)  # (stage, ep, coordinate) -> ranks
        for rank in range(fleet.trainers):
            at = fleet.source(rank)
            stages[at.pp.rank] = [layer for chunk in stage_layers(shape.layers, at) for layer in chunk]
            self._dense[at.pp.rank, at.tp.rank].append(rank)
            self._sparse[at.pp.rank, at.ep.rank, at.etp.rank].append(rank)
        self.stage = {layer: number for number, layers in enumerate(stages) for layer in layers}
        self.stage |= {EMBEDDING: 0, HEAD: sizes.pipeline - 1}
        self.layers_of_stages = stages
        stages[0] = [EMBEDDING, *stages[0]]
        stages[-1] = [*stages[-1], HEAD]
        self._engine = [engine_layout_of(fleet, rank) for rank in range(fleet.replica_size)]
        # replicas of one node move as one group, so that what they share crosses the network once
        self.group_size = max(fleet.replica_size, min(fleet.node, fleet.receivers))
        self.group_of_gpu = np.maximum(0, np.arange(fleet.gpus) - fleet.first) // self.group_size
        self._sent = [0] * fleet.gpus
        self._taken = [0] * fleet.gpus
        self._found: list[Ints] = []  # [COLUMNS, rows]

    def rows(self) -> dict[str, Ints]:
        columns = np.concatenate(self._found, axis=1)
        rows = dict(zip(COLUMNS, columns, strict=True))
        return rows | {"is_relay": rows["is_relay"].astype(bool)}

    def deal(self, bundles: Sequence[Bundle], number: int, layers: Sequence[int]) -> None:
        """Largest first, from whom has sent least of this layer to this group, then least of all."""
        order = sorted(range(len(bundles)), key=lambda index: -bundles[index].num_bytes)
        keepers = {index: self._by_node(bundles[index]) for index in order}
        found: list[tuple[int, ...]] = []
        for layer in layers:
            local: dict[tuple[int, int], int] = defaultdict(int)  # (group, rank) -> bytes
            for index in order:
                bundle = bundles[index]
                holders = [rank for at in bundle.sources for rank in self._dense[self.stage[layer], at]]
                for gpus in keepers[index]:
                    pairs = self._pairs(gpus, holders, local, bundle.num_bytes)
                    found += [(number + index, layer, -1, *pair) for pair in pairs]
        self._found.append(np.array(found, dtype=np.int64).reshape(-1, len(COLUMNS)).T)

    def _pairs(
        self, gpus: Sequence[int], holders: Sequence[int], local: dict[tuple[int, int], int], num_bytes: int
    ) -> list[tuple[int, int, bool]]:
        """(source, destination, is forwarded) for the GPUs of one node."""
        node = gpus[0] // self._fleet.node
        near = [rank for rank in holders if rank // self._fleet.node == node]
        pairs = [(gpu, gpu, False) for gpu in gpus if gpu in near]
        rest = [gpu for gpu in gpus if gpu not in near]
        if not rest:
            return pairs
        group = int(self.group_of_gpu[rest[0]])
        first = min(rest, key=lambda gpu: self._taken[gpu])
        direct = rest if near else [first]
        for gpu in direct:
            source = min(near or holders, key=lambda rank: (local[group, rank], self._sent[rank]))
            local[group, source] += num_bytes
            self._sent[source] += num_bytes
            self._taken[gpu] += num_bytes
            pairs.append((source, gpu, False))
        return pairs + [(first, gpu, True) for gpu in rest if gpu not in direct]

    def deal_experts(self, bundles: Sequence[Bundle], number: int, layers: Sequence[int]) -> None:
        """All layers and experts at once: holders take turns."""
        sizes = self._fleet.parallel
        each = self._shape.experts // sizes.expert  # experts of a trainer's rank
        kept = self._shape.experts // self._engine[0].ep.size  # and of an engine's
        stages = np.array([self.stage[layer] for layer in layers])[:, None]
        for index, bundle in enumerate(bundles):
            holders = np.array(
                [
                    [[r for at in bundle.sources for r in self._sparse[p, e, at]] for e in range(sizes.expert)]
                    for p in range(sizes.pipeline)
                ]
            )  # [pp, ep, holders]
            for part in range(self._engine[0].ep.size):
                experts = np.arange(part * kept, (part + 1) * kept)[None]
                able = holders[stages, experts // each]  # [layers, experts, holders]
                for turn, gpus in enumerate(self._by_node(bundle, part)):
                    self._deal_node(
                        number + index, np.array(layers)[:, None], experts, able, gpus, turn + experts % each
                    )

    def _deal_node(self, bundle: int, layers: Ints, experts: Ints, able: Ints, gpus: Sequence[int], turn: Ints) -> None:
        """One bundle of these experts in all layers, to the GPUs of one node that keep it."""
        count = able.shape[2]
        near = able // self._fleet.node == gpus[0] // self._fleet.node  # [layers, experts, holders]
        order = (np.arange(count) + np.broadcast_to(turn, able.shape[:2])[..., None]) % count  # all take turns
        far = np.take_along_axis(able, order.argmax(2)[..., None], 2)[..., 0]
        closest = np.take_along_axis(able, (near * (1 + order)).argmax(2)[..., None], 2)[..., 0]
        is_near = near.any(2)
        first = np.array(gpus)[np.broadcast_to((turn + layers) % len(gpus), is_near.shape)]
        for gpu in gpus:
            is_relay = ~is_near & (first != gpu)
            source = np.where(is_near, closest, np.where(is_relay, first, far))
            source = np.where((able == gpu).any(2), gpu, source)
            columns = np.broadcast_arrays(bundle, layers, experts, source, gpu, is_relay)
            self._found.append(np.stack([column.ravel() for column in columns]))

    def _by_node(self, bundle: Bundle, part: int = 0) -> list[list[int]]:
        """Engine GPUs that keep this bundle (of experts: the `part`-th of expert-parallel ranks), node by node."""
        nodes: dict[int, list[int]] = defaultdict(list)
        for rank in range(self._fleet.receivers):
            at = self._engine[rank % len(self._engine)]
            is_kept = at.etp.rank in bundle.destinations and at.ep.rank == part
            if is_kept if bundle.is_expert else at.tp.rank in bundle.destinations:
                gpu = self._fleet.first + rank
                nodes[gpu // self._fleet.node].append(gpu)
        return list(nodes.values())
