"""The right slice in the right place, proven without a full tensor, and without trusting the plan.

    trainer: slices read from the parameters  --positional_checksum-->  sums by tensor --+
                                                                                         +--> equal, for each replica
    engine: slices read from its memory       --positional_checksum-->  sums by tensor --+

Each side counts every rectangle once, on the first rank that holds it. Positional checksums add up over rectangles
however a tensor is split, so the two sums agree only when every element lies where its side's slices say: a slice that
went to the wrong rank, or to the wrong rows of the right one, changes the sum even though all bytes arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.models.shards import ShardSlice
from megarl.types import CheckFailed
from megarl.weights.checksum import positional_checksum
from megarl.weights.plan import Boxes
from megarl.weights.transports import Transport

__all__ = ["PlacementCheck"]


@dataclass(frozen=True)
class PlacementCheck:
    names: Sequence[str]  # HF tensors
    sources: Boxes  # [rank] -> boxes that it counts of the trainer's
    destinations: Sequence[
        Sequence[int]
    ]  # [rank] -> the tensor of each box of the engine's, -1: another rank counts it
    ranks_per_replica: int
    dtype: torch.dtype  # of what moves; fp32 tensors are words of it
    paired: frozenset[str] = frozenset()  # tensors whose last dim the trainer's boxes see as pairs

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        sources: Boxes,
        destinations: Boxes,
        ranks_per_replica: int,
        dtype: torch.dtype,
        paired: frozenset[str] = frozenset(),
    ) -> PlacementCheck:
        number = {name: index for index, name in enumerate(names)}
        counted: list[list[ShardSlice]] = []
        seen: set[tuple[object, ...]] = set()
        for boxes in sources:
            counted.append([box for box in boxes if not _seen(box, seen)])
        theirs: list[list[int]] = []
        for rank, boxes in enumerate(destinations):
            if rank % ranks_per_replica == 0:
                seen = set()
            theirs.append([-1 if _seen(box, seen) else number[box.name] for box in boxes])
        return cls(names, counted, theirs, ranks_per_replica, dtype, paired)

    def compare(self, transport: Transport, parameters: Mapping[str, Tensor], engine: Tensor) -> None:
        """`engine` [boxes of this rank] int64. Raises CheckFailed, on all ranks, naming replicas and tensors."""
        replicas = transport.world // self.ranks_per_replica
        sums = torch.zeros(1 + replicas, len(self.names), dtype=torch.int64, device=engine.device)
        number = {name: index for index, name in enumerate(self.names)}
        for box in self.sources[transport.rank]:
            tensor = parameters[box.param].detach().view(self.dtype)
            part = tensor.as_strided(box.shape, box.strides, tensor.storage_offset() + box.offset)
            start = box.start
            if box.name in self.paired:
                part, start = part.flatten(-2), (*start[:-2], 2 * start[-2])
            sums[0, number[box.name]] += positional_checksum(part, start)
        which = torch.tensor(self.destinations[transport.rank], dtype=torch.int64, device=engine.device)
        counted = which >= 0
        sums[1 + transport.rank // self.ranks_per_replica].index_add_(0, which[counted], engine[counted])
        sums = transport.sum(sums)
        wrong = (sums[1:] != sums[0]).nonzero().tolist()
        if wrong:
            shown = "; ".join(f"{self.names[tensor]} in the engine on {self._ranks(r)}" for r, tensor in wrong[:4])
            rest = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            raise CheckFailed(
                f"slices of weights lie in the wrong place, though every bucket arrived as sent: {shown}{rest}; "
                "the tables of this model's family, or the plan, are wrong"
            )

    def _ranks(self, replica: int) -> str:
        first = replica * self.ranks_per_replica
        return (
            f"rank {first}" if self.ranks_per_replica == 1 else f"ranks {first}..{first + self.ranks_per_replica - 1}"
        )


def _seen(box: ShardSlice, seen: set[tuple[object, ...]]) -> bool:
    rectangle = (box.name, box.start, box.shape)
    if rectangle in seen:
        return True
    seen.add(rectangle)
    return False
