"""Buckets between ranks of one torch.distributed world, point to point: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Collective"]


class Collective:
    """`group=None`: the whole world, whose ranks the plan counts."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def start(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Callable[[], None]:
        operations = [self._operation(dist.isend, flat, peer) for peer, flat in sorted(outgoing.items())]
        operations += [self._operation(dist.irecv, flat, peer) for peer, flat in sorted(incoming.items())]
        works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            while works:  # once each: a second wait on a gloo transfer never returns
                works.pop().wait()

        return wait

    def _operation(self, kind: Callable[..., Any], flat: Tensor, peer: int) -> dist.P2POp:
        # as bytes: gloo and NCCL then need not know the dtype
        return dist.P2POp(kind, flat.view(torch.uint8), group=self._group, group_peer=peer)

    def sum(self, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=self._group)
        return total

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self._group)
        return found
