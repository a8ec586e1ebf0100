"""Groups the regions of tensors that move together, given the slices of trainer and engine.

(coordinate, ShardSlice) of the trainer  x  of the engine  --transfer_groups-->  TransferGroups

A coordinate is a rank, or a rank along the axis that splits the tensor (`plan/tables.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

from megarl.models.shape import Shape
from megarl.models.shards import ShardSlice

Rectangle = tuple[Shape, Shape]  # (start, shape)
Ranks = tuple[int, ...]
Located = tuple[int, ShardSlice]  # (coordinate, slice)
ByCoordinate = dict[int, ShardSlice]
ByRectangle = dict[Rectangle, list[Located]]


@dataclass(frozen=True)
class Overlap:
    """The region [start, start + shape) of an HF tensor, and both sides' slices that contain it."""

    name: str
    start: Shape
    shape: Shape
    sources: ByCoordinate
    destinations: ByCoordinate

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class TransferGroup:
    """Overlaps that move together, from any coordinate of `sources` to all of `destinations`."""

    overlaps: tuple[Overlap, ...]
    unit: int  # position within a layer
    repeats: int = 1  # number of consecutive experts

    @property
    def sources(self) -> Ranks:
        return tuple(self.overlaps[0].sources)

    @property
    def destinations(self) -> Ranks:
        return tuple(self.overlaps[0].destinations)

    @property
    def numel(self) -> int:
        return self.repeats * sum(overlap.numel for overlap in self.overlaps)


def transfer_groups(
    sources: Iterable[Located],
    destinations: Iterable[Located],
    *,
    max_numel: int,
    is_expert: bool = False,
) -> list[TransferGroup]:
    """Returns groups of at most `max_numel` elements, split along dim 0 if necessary; a single row
    may be larger. Each tensor is a unit; with `is_expert`, all tensors form one unit. Raises
    ValueError naming the tensor if the sources overlap or do not cover a destination."""
    senders = _by_rectangle(sources)
    receivers = _by_rectangle(destinations)
    by_ranks = {}
    for unit, (name, wanted) in enumerate(receivers.items()):
        if is_expert:
            unit = 0
        available = senders.get(name, {})
        for one, other in combinations(available, 2):
            if intersect(one, other) is not None:
                shown = " and ".join(f"{start}+{shape}" for start, shape in (one, other))
                raise ValueError(f"{name}: two source rectangles overlap: {shown}")
        for overlap in _overlaps(name, available, wanted):
            key = (unit, tuple(overlap.sources), tuple(overlap.destinations))
            by_ranks.setdefault(key, []).append(overlap)
    groups = []
    for (unit, *_), overlaps in by_ranks.items():
        groups += _split(overlaps, unit, max_numel)
    return groups


def intersect(one: Rectangle, other: Rectangle) -> Rectangle | None:
    start = tuple(map(max, one[0], other[0]))
    ends = (min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    shape = tuple(end - first for end, first in zip(ends, start, strict=True))
    if any(size <= 0 for size in shape):
        return None
    return start, shape


def _by_rectangle(slices: Iterable[Located]) -> dict[str, ByRectangle]:
    by_name = {}
    for coordinate, part in slices:
        rectangles = by_name.setdefault(part.name, {})
        rectangles.setdefault((part.start, part.shape), []).append((coordinate, part))
    return by_name


def _overlaps(name: str, sources: ByRectangle, destinations: ByRectangle) -> Iterator[Overlap]:
    # (region, n) -> slices; a coordinate that stores a region twice has entries for n = 0 and 1
    regions = {}
    for wanted, receiving in destinations.items():
        numel = prod(wanted[1])
        covered = 0
        for rectangle, sending in sources.items():
            region = intersect(rectangle, wanted)
            if region is None:
                continue
            covered += prod(region[1])
            senders = dict(reversed(sending))  # for a rank with several slices, the first
            for coordinate, part in receiving:
                number = 0
                while coordinate in regions.setdefault((region, number), (senders, {}))[1]:
                    number += 1
                regions[region, number][1][coordinate] = part
        if covered != numel:
            raise ValueError(
                f"{name}: the engine keeps {numel} elements from {wanted[0]} of shape "
                f"{wanted[1]}, but the trainer holds {covered} of them"
            )
    for ((start, shape), _), (senders, receivers) in regions.items():
        yield Overlap(
            name,
            start,
            shape,
            dict(sorted(senders.items())),
            receivers,
        )


def _split(overlaps: Sequence[Overlap], unit: int, max_numel: int) -> Iterator[TransferGroup]:
    if sum(overlap.numel for overlap in overlaps) <= max_numel:
        yield TransferGroup(tuple(overlaps), unit)
        return
    for overlap in overlaps:
        begin, *start = overlap.start
        rows, *shape = overlap.shape
        step = max(1, max_numel // max(1, prod(shape)))
        for first in range(0, rows, step):
            count = min(step, rows - first)
            part = replace(overlap, start=(begin + first, *start), shape=(count, *shape))
            yield TransferGroup((part,), unit)
