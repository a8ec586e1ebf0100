"""Proves that every slice is in its place, without gathering a tensor or trusting the plan.

    trainer: slices read from the parameters   --positional_checksum--> sums by tensor --+
                                                                                         +--> equal, for each replica
    engine: slices read from its memory        --positional_checksum--> sums by tensor --+

Positional checksums add up over slices, however a tensor is split. The sums agree only if every element is where the
slices of its side say: a slice on the wrong rank, or in the wrong rows, changes the sum even if all bytes arrived. A
side with n copies of a tensor, as its element count shows, has n times the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megarl.models.shards import ShardSlice
from megarl.types import CheckFailed
from megarl.weights.checksum import positional_checksum
from megarl.weights.execute import Encoder, read_slice
from megarl.weights.plan import first_few
from megarl.weights.transports import Transport


@dataclass(frozen=True)
class PlacementCheck:
    shapes: Mapping[str, tuple[int, ...]]  # of every HF tensor, in elements of `dtype`
    receivers: Sequence[int]  # ranks with an engine
    ranks_per_replica: int

    def compare(self, transport: Transport, sent: Tensor, received: Tensor) -> None:
        """A collective. `sent`, `received`: `sums_by_tensor` of the trainer's and of the engine's slices on this rank.
        Raises CheckFailed, on all ranks, naming replicas and tensors."""
        replicas = len(self.receivers) // self.ranks_per_replica
        # [trainer and replicas, (elements, checksum), tensors]
        sums = torch.stack([sent, *(torch.zeros_like(sent) for _ in range(replicas))])
        if transport.rank in self.receivers:
            sums[1 + self.receivers.index(transport.rank) // self.ranks_per_replica] = received
        counts, sums = transport.sum(sums).unbind(1)
        numel = counts.new_tensor([prod(shape) for shape in self.shapes.values()])
        copies, is_whole = counts // numel, (counts > 0) & (counts % numel == 0)
        is_equal = (sums[1:] * copies[0] == sums[0] * copies[1:]) & is_whole[0] & is_whole[1:]
        wrong = (~is_equal).nonzero().tolist()
        if wrong:
            names, count = list(self.shapes), self.ranks_per_replica
            ranks = [
                self.receivers[replica * count : (replica + 1) * count]
                for replica in range(replicas)
            ]
            where = [
                f"rank {some[0]}" if len(some) == 1 else f"ranks {some[0]}..{some[-1]}"
                for some in ranks
            ]
            shown = first_few(
                [f"{names[tensor]} in the engine on {where[r]}" for r, tensor in wrong],
                separator="; ",
            )
            raise CheckFailed(
                f"slices of weights are in the wrong place, although every message arrived intact: {shown}; "
                "the model family's table or the plan is wrong, or trainer replicas have different weights"
            )


def slice_checksum(
    part: ShardSlice,
    parameters: Mapping[str, Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    encoder: Encoder | None = None,
) -> Tensor:
    """Returns the positional checksum of a slice of an HF tensor of `shape`, read from its parameter."""
    view, start = read_slice(parameters[part.param], part, dtype, encoder), part.start
    if len(part.shape) > len(shape):  # its last dim viewed as pairs
        view, start = view.flatten(-2), (*start[:-2], 2 * start[-2])
    return positional_checksum(view, start)


def sums_by_tensor(names: Iterable[str], slices: Sequence[ShardSlice], checksums: Tensor) -> Tensor:
    """Returns [2, names] int64: elements and positional checksum, summed over the slices of each tensor."""
    number = {name: index for index, name in enumerate(names)}
    index = torch.tensor(
        [number[part.name] for part in slices], dtype=torch.int64, device=checksums.device
    )
    numel = torch.tensor(
        [part.numel for part in slices], dtype=torch.int64, device=checksums.device
    )
    return checksums.new_zeros(2, len(number)).index_add(1, index, torch.stack([numel, checksums]))
