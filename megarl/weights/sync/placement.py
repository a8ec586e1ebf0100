"""Proves that every slice is in its place, without gathering a tensor or trusting the plan.

    trainer: slices read from the parameters  --positional_checksum--> sums by tensor --+
                                                               equal, for each replica  +-->
    engine: slices read from its memory       --positional_checksum--> sums by tensor --+

Positional checksums add up over slices, however a tensor is split. The sums agree only if every
element is where the slices of its side place it: a slice on the wrong rank, or in the wrong rows,
changes the sum even if all bytes arrived. A side with n copies of a tensor, as its element count
shows, has n times the sum."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from megarl.models.shape import Shape
from megarl.models.shards import Slices
from megarl.types import CheckFailed
from megarl.weights.plan.plan import first_few
from megarl.weights.sync.transports import Transport


def check_placement(
    transport: Transport,
    shapes: Mapping[str, Shape],
    replicas: Sequence[Sequence[int]],
    sent: Tensor,
    received: Tensor,
) -> None:
    """A collective. Raises CheckFailed, on all ranks, naming replicas and tensors, if the sums of a
    replica differ from the trainer's. `shapes`: HF tensor -> shape in transfer elements.
    `replicas`: the ranks of each engine replica. `sent`, `received`: `sums_by_tensor` of the
    trainer's and of the engine's slices on this rank."""
    # [trainer and replicas, (elements, checksum), tensors]
    sums = sent.new_zeros(1 + len(replicas), *sent.shape)
    sums[0] = sent
    for number, ranks in enumerate(replicas, 1):
        if transport.rank in ranks:
            sums[number] = received
    counts, sums = transport.sum(sums).unbind(1)
    numel = counts.new_tensor([prod(shape) for shape in shapes.values()])
    copies = counts // numel
    is_whole = (counts > 0) & (counts % numel == 0)
    is_equal = (sums[1:] * copies[0] == sums[0] * copies[1:]) & is_whole[0] & is_whole[1:]
    wrong = (~is_equal).nonzero().tolist()
    if wrong:
        names = list(shapes)
        places = [f"{names[tensor]} in {_engine(replicas[replica])}" for replica, tensor in wrong]
        raise CheckFailed(
            "slices of weights are in the wrong place, although every message arrived intact: "
            f"{first_few(places, separator='; ')}; the model family's table or the plan is "
            "wrong, or trainer replicas have different weights"
        )


def _engine(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"the engine on rank {ranks[0]}"
    return f"the engine on ranks {ranks[0]}..{ranks[-1]}"


def sums_by_tensor(names: Iterable[str], slices: Slices, checksums: Tensor) -> Tensor:
    """Returns [2, names] int64: elements and positional checksum, summed over the slices of each
    tensor."""
    number = {name: index for index, name in enumerate(names)}
    index = torch.tensor(
        [number[part.name] for part in slices], dtype=torch.int64, device=checksums.device
    )
    numel = index.new_tensor([part.numel for part in slices])
    return checksums.new_zeros(2, len(number)).index_add(1, index, torch.stack([numel, checksums]))
