"""A table read off somebody else's conversion: HF tensors whose values say where they stand, decoded where they land.

    IndexTensors (a mapping of names to tensors)  --a conversion that is not ours-->  a parameter's shard, twice
    slices_from_indices(first, second)                  -->  boxes of that parameter | ValueError

The first time every element is its own number, the second time a random number drawn from it. What was only placed
shows the same element both times; whatever was computed, cast or made up does not. Both are whole numbers below 2^53,
which fp64 holds exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from megarl.models.shards import ShardSlice

__all__ = ["REMEDY", "IndexTensors", "slices_from_indices"]

REMEDY = "a family like this needs a table (CONTRIBUTING.md, 'Adding a model family')"
MOST_BOXES = 4096  # of one HF tensor in one parameter; more are no plan but a list of elements


class IndexTensors(Mapping[str, Tensor]):
    """HF tensors by name, made when asked for: [shape] fp64."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self.first: dict[str, int] = {}  # tensors that were asked for -> the number of their first element
        self.shapes = shapes
        self.is_second = False
        self._device = device
        self._next = 1  # 0 is padding

    def __getitem__(self, name: str) -> Tensor:
        numel = prod(self.shapes[name])
        if name not in self.first:
            self.first[name] = self._next
            self._next += numel
        start = self.first[name]
        numbers = torch.arange(start, start + numel, device=self._device)
        return (_drawn(numbers) if self.is_second else numbers).double().view(self.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def _drawn(numbers: Tensor) -> Tensor:
    """[n] int64 below 2^52, as good as random: a multiplicative hash (Knuth, TAOCP 6.4); 0 stays 0."""
    mixed = numbers * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    return (mixed >> 11) & ((1 << 52) - 1)


def slices_from_indices(
    param: str, first: Tensor, second: Tensor, codes: IndexTensors, *, padded: bool = False
) -> list[ShardSlice]:
    """Where `param` holds what; `padded`: some of its elements may be zeros that come from nowhere.

    Raises ValueError, naming tensors and parameter, for anything but a placement.
    """
    source = " and ".join(codes.first) or "nothing"
    if first.shape != second.shape or first.dtype != torch.float64:
        raise ValueError(f"{param}: its conversion from {source} is not the same twice; {REMEDY}")
    numbers = first.flatten().long()
    if (numbers != first.flatten()).any() or (_drawn(numbers) != second.flatten()).any():
        raise ValueError(f"{param} is computed from {source}, not copied; {REMEDY}")
    places = numbers.nonzero().squeeze(1)
    if places.numel() != numbers.numel() and not padded:
        raise ValueError(f"{numbers.numel() - places.numel()} elements of {param} come from no element of {source}")
    numbers, order = numbers[places].sort()
    places = places[order]
    if (numbers.diff() == 0).any():
        raise ValueError(f"{param} holds an element of {source} twice; {REMEDY}")
    found: list[ShardSlice] = []
    for name, start in codes.first.items():
        low, high = torch.searchsorted(numbers, numbers.new_tensor([start, start + prod(codes.shapes[name])])).tolist()
        found += _boxes(name, param, numbers[low:high] - start, places[low:high], codes.shapes[name])
    return found


def _boxes(name: str, param: str, index: Tensor, place: Tensor, size: tuple[int, ...]) -> list[ShardSlice]:
    """`index` [n] ascending in the flat HF tensor, `place` [n] in the flat parameter."""
    if not index.numel():
        return []
    dims = len(size)
    starts, lengths, step = _runs(index, place, torch.div(index, size[-1], rounding_mode="floor"))
    if starts.numel() > MOST_BOXES * max(1, prod(size[:-1])):
        raise ValueError(f"{param} takes {name} in {starts.numel()} parts; {REMEDY}")
    start = torch.stack(torch.unravel_index(index[starts], size), 1)  # [blocks, dims]
    offset = place[starts]
    shape, strides = torch.ones_like(start), torch.zeros_like(start)
    shape[:, -1], strides[:, -1] = lengths, step
    for dim in range(dims - 2, -1, -1):
        others = torch.cat([start[:, :dim], start[:, dim + 1 :], shape, strides], 1)
        _, alike = others.unique(dim=0, return_inverse=True)
        order = torch.argsort(start[:, dim], stable=True)
        order = order[torch.argsort(alike[order], stable=True)]
        start, shape, strides, offset, alike = start[order], shape[order], strides[order], offset[order], alike[order]
        starts, lengths, step = _runs(start[:, dim], offset, alike)
        start, shape, strides, offset = start[starts], shape[starts], strides[starts], offset[starts]
        shape[:, dim], strides[:, dim] = lengths, step
    if len(start) > MOST_BOXES:
        raise ValueError(f"{param} takes {name} in {len(start)} parts; {REMEDY}")
    rows = zip(start.tolist(), shape.tolist(), offset.tolist(), strides.tolist(), strict=True)
    return [ShardSlice(name, tuple(at), tuple(n), param, o, tuple(by)) for at, n, o, by in rows]


def _runs(at: Tensor, place: Tensor, alike: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Stretches where `at` counts up by one, `alike` stays and `place` moves on evenly: (first, length, step)."""
    steps = place.diff()
    joined = (at.diff() == 1) & (alike.diff() == 0) & (steps > 0)  # torch has no views with negative strides
    index = torch.arange(len(steps), device=at.device)
    turns = torch.zeros_like(joined)
    turns[1:] = joined[1:] & joined[:-1] & (steps[1:] != steps[:-1])
    # a jump shows twice, on its way and behind it; only the first is a border: every other one of those in a row
    since = index - torch.where(turns, -1, index).cummax(0).values if len(index) else index
    borders = ~joined | (turns & (since % 2 == 1))
    first = torch.cat([index.new_zeros(1), borders.nonzero().squeeze(1) + 1])
    length = torch.cat([first[1:], index.new_tensor([len(at)])]) - first
    step = torch.cat([steps, steps.new_zeros(1)])[first]
    return first, length, torch.where(length > 1, step, 0)
