"""Proves that every slice lies in its place, without a full tensor and without trusting the plan.

    trainer: slices read from the parameters   --positional_checksum--> sums by tensor --+
                                                                                         +--> equal, for each replica
    engine: slices read from its memory        --positional_checksum--> sums by tensor --+

Positional checksums add up over slices however a tensor is split, so the sums agree only when every element lies where
its side's slices say: a slice that went to the wrong rank, or to the wrong rows of the right one, changes the sum even
though all bytes arrived. A side that holds a tensor n times, as its count of elements shows, has n times the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megarl.models.shards import ShardSlice
from megarl.types import CheckFailed
from megarl.weights.checksum import positional_checksum
from megarl.weights.execute import strided_view
from megarl.weights.transports import Transport

__all__ = ["PlacementCheck"]


@dataclass(frozen=True)
class PlacementCheck:
    shapes: Mapping[str, tuple[int, ...]]  # of every HF tensor, in elements of `dtype`
    dtype: torch.dtype  # of what moves
    receivers: Sequence[int]  # ranks with an engine
    ranks_per_replica: int

    def compare(
        self,
        transport: Transport,
        sent: tuple[
            Sequence[ShardSlice], Mapping[str, Tensor]
        ],  # the trainer's slices of this rank, and its parameters
        received: tuple[Sequence[ShardSlice], Tensor],  # the engine's of this rank, and their positional checksums
    ) -> None:
        """Every rank calls it. Raises CheckFailed, on all ranks, naming replicas and tensors."""
        slices, parameters = sent
        replicas, device = len(self.receivers) // self.ranks_per_replica, received[1].device
        # [trainer and replicas, (elements, checksum), tensors]
        sums = torch.zeros(1 + replicas, 2, len(self.shapes), dtype=torch.int64, device=device)
        checksums = [self._checksum(part, parameters) for part in slices]
        self._add(sums[0], slices, torch.stack(checksums) if checksums else sums.new_zeros(0))
        if transport.rank in self.receivers:
            self._add(sums[1 + self.receivers.index(transport.rank) // self.ranks_per_replica], *received)
        counts, sums = transport.sum(sums).unbind(1)
        numel = counts.new_tensor([prod(shape) for shape in self.shapes.values()])
        copies, is_whole = counts // numel, (counts > 0) & (counts % numel == 0)
        is_equal = (sums[1:] * copies[0] == sums[0] * copies[1:]) & is_whole[0] & is_whole[1:]
        wrong = (~is_equal).nonzero().tolist()
        if wrong:
            names = list(self.shapes)
            shown = "; ".join(f"{names[tensor]} in the engine on {self._ranks(r)}" for r, tensor in wrong[:4])
            rest = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            raise CheckFailed(
                f"slices of weights lie in the wrong place, though every message arrived as sent: {shown}{rest}; the "
                "tables of this model's family or the plan are wrong, or replicas of the trainer hold different weights"
            )

    def _checksum(self, part: ShardSlice, parameters: Mapping[str, Tensor]) -> Tensor:
        view, start = strided_view(parameters[part.param], part, part.shape, self.dtype), part.start
        if len(part.shape) > len(self.shapes[part.name]):  # the last dim seen as pairs
            view, start = view.flatten(-2), (*start[:-2], 2 * start[-2])
        return positional_checksum(view, start)

    def _add(self, sums: Tensor, slices: Sequence[ShardSlice], checksums: Tensor) -> None:
        number = {name: index for index, name in enumerate(self.shapes)}
        index = torch.tensor([number[part.name] for part in slices], dtype=torch.int64, device=sums.device)
        numel = torch.tensor([part.numel for part in slices], dtype=torch.int64, device=sums.device)
        sums.index_add_(1, index, torch.stack([numel, checksums]))

    def _ranks(self, replica: int) -> str:
        ranks = self.receivers[replica * self.ranks_per_replica :][: self.ranks_per_replica]
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}..{ranks[-1]}"
