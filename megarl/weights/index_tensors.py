"""Derives a table by running an external converter on HF tensors whose elements are their own
indices.

    IndexTensors (names -> tensors)  --external conversion-->  a parameter's shard, twice
    moved_slices(parameter, first, second)  -->  its ShardSlices | ValueError

In the first run every element is its index, in the second a hash of it. An element that is only
moved gives the same index in both runs; an element that is computed or cast does not. All values
are integers below 2^53, which fp64 represents exactly."""

from collections import UserDict
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from megarl.models.shape import Shape
from megarl.models.shards import ShardSlice

REMEDY = "a family like this needs a table (CONTRIBUTING.md, 'Adding a model family')"
MAX_SLICES = 4096  # per HF tensor and parameter; more would be a list of elements, not a plan


class IndexTensors(UserDict[str, Any]):
    """HF tensors by name: [shape] fp64, created on access from the shapes in `data`."""

    def __init__(self, shapes: Mapping[str, Shape], device: torch.device) -> None:
        super().__init__(shapes)
        self.first: dict[str, int] = {}  # name of an accessed tensor -> index of its first element
        self.is_second = False
        self._device = device
        self._next = 1  # 0 is padding

    def __getitem__(self, name: str) -> Tensor:
        shape = self.data[name]
        numel = prod(shape)
        if name not in self.first:
            self.first[name] = self._next
            self._next += numel
        first = self.first[name]
        numbers = torch.arange(first, first + numel, device=self._device)
        if self.is_second:
            numbers = _scramble(numbers)
        return numbers.double().view(shape)


def _scramble(numbers: Tensor) -> Tensor:
    """Returns [n] int64 below 2^52: a multiplicative hash (Knuth, TAOCP 6.4); 0 stays 0."""
    mixed = numbers * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    return (mixed >> 11) & ((1 << 52) - 1)


def moved_slices(
    param: str,
    first: Tensor,
    second: Tensor,
    tensors: IndexTensors,
    *,
    padded: bool = False,
) -> list[ShardSlice]:
    """Returns the slices of HF tensors that `param` contains. With `padded`, the other elements of
    `param` may be zero. Raises ValueError, naming tensors and parameter, if the conversion does
    more than move elements."""
    sources = " and ".join(tensors.first) or "nothing"
    if first.shape != second.shape or first.dtype != torch.float64:
        raise ValueError(f"{param}: two runs of its conversion from {sources} differ; {REMEDY}")
    first = first.flatten()
    numbers = first.long()  # index of the HF element at each position of `param`
    is_copied = (numbers == first) & (_scramble(numbers) == second.flatten())
    if not is_copied.all():
        raise ValueError(f"{param} is computed from {sources}, not copied; {REMEDY}")
    positions = numbers.nonzero().squeeze(1)  # positions in `param`, without padding
    missing = numbers.numel() - positions.numel()
    if missing and not padded:
        raise ValueError(f"{missing} elements of {param} have no source in {sources}")
    numbers, order = numbers[positions].sort()
    positions = positions[order]
    if (numbers.diff() == 0).any():
        raise ValueError(f"{param} holds an element of {sources} twice; {REMEDY}")
    slices = []
    for name, start in tensors.first.items():
        shape = tensors.data[name]
        ends = numbers.new_tensor([start, start + prod(shape)])
        low, high = torch.searchsorted(numbers, ends).tolist()
        slices += _slices(
            name,
            param,
            numbers[low:high] - start,
            positions[low:high],
            shape,
        )
    return slices


def _slices(
    name: str,
    param: str,
    index: Tensor,
    position: Tensor,
    size: Shape,
) -> list[ShardSlice]:
    """Merges elements into slices, one dim at a time. `index` [n]: positions in the flat HF tensor,
    ascending; `position` [n]: positions in the flat `param`."""
    if not index.numel():
        return []
    row = torch.div(index, size[-1], rounding_mode="floor")
    first, lengths, step = _runs(index, position, row)
    if first.numel() > MAX_SLICES * max(1, prod(size[:-1])):
        raise ValueError(f"{param} needs too many slices of {name} ({first.numel()}); {REMEDY}")
    start = torch.stack(torch.unravel_index(index[first], size), 1)
    # [slices, (start, shape, strides), dims]
    boxes = torch.stack([start, torch.ones_like(start), torch.zeros_like(start)], 1)
    boxes[:, 1, -1] = lengths
    boxes[:, 2, -1] = step
    offset = position[first]
    for dim in range(len(size) - 2, -1, -1):
        start = boxes[:, 0, dim]
        others = boxes.clone()
        others[:, 0, dim] = 0
        _, group = others.unique(dim=0, return_inverse=True)
        order = torch.argsort(start, stable=True)
        order = order[torch.argsort(group[order], stable=True)]
        first, lengths, step = _runs(start[order], offset[order], group[order])
        merged = order[first]
        boxes = boxes[merged]
        offset = offset[merged]
        boxes[:, 1, dim] = lengths
        boxes[:, 2, dim] = step
    if len(boxes) > MAX_SLICES:
        raise ValueError(f"{param} needs too many slices of {name} ({len(boxes)}); {REMEDY}")
    return [
        ShardSlice(
            name,
            tuple(start),
            tuple(shape),
            param,
            offset,
            tuple(strides),
        )
        for (start, shape, strides), offset in zip(boxes.tolist(), offset.tolist(), strict=True)
    ]


def _runs(index: Tensor, position: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (first, length, step) of the runs in which `index` rises by one within a group, and
    `position` by a constant step."""
    steps = position.diff()
    # torch has no views with negative strides
    joined = (index.diff() == 1) & (group.diff() == 0) & (steps > 0)
    gaps = torch.arange(len(steps), device=index.device)
    turns = torch.zeros_like(joined)
    turns[1:] = joined[1:] & joined[:-1] & (steps[1:] != steps[:-1])
    # a jump in position changes the step twice (1, 9, 1); only the first change starts a run, so
    # take every other one
    since = gaps - torch.where(turns, -1, gaps).cummax(0).values
    borders = ~joined | (turns & (since % 2 == 1))
    first = torch.cat([gaps.new_zeros(1), borders.nonzero().squeeze(1) + 1])
    length = first.diff(append=gaps.new_tensor([len(index)]))
    step = torch.cat([steps, steps.new_zeros(1)])[first]
    return first, length, torch.where(length > 1, step, 0)
