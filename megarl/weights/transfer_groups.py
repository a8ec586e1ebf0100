"""Intersects the slices of trainer and engine: regions of HF tensors, grouped by their senders and receivers.

    (coordinate, ShardSlice) of the trainer  x  of the engine  --transfer_groups-->  TransferGroups

With tables, a coordinate is a rank along the axis that splits the tensor, and names are templates: one layer of each
kind is intersected, once for all layers. With recorded slices, a coordinate is a rank of the world.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count
from math import prod

from megarl.models.shards import ShardSlice

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # (start, shape)


@dataclass(frozen=True, slots=True)
class Overlap:
    """[start, start + shape) of one HF tensor, and the slices of both sides that contain it, by coordinate."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    sources: Mapping[int, ShardSlice]
    destinations: Mapping[int, ShardSlice]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class TransferGroup:
    """Overlaps that move together, from any coordinate of `sources` to all of `destinations`."""

    overlaps: tuple[Overlap, ...]
    unit: int  # order within a layer
    repeats: int = 1  # number of consecutive experts

    @property
    def sources(self) -> tuple[int, ...]:
        return tuple(self.overlaps[0].sources)

    @property
    def destinations(self) -> tuple[int, ...]:
        return tuple(self.overlaps[0].destinations)

    @property
    def numel(self) -> int:
        return self.repeats * sum(overlap.numel for overlap in self.overlaps)


def transfer_groups(
    sources: Iterable[tuple[int, ShardSlice]],
    destinations: Iterable[tuple[int, ShardSlice]],
    *,
    max_numel: int,
    is_expert: bool = False,
) -> list[TransferGroup]:
    """Groups of at most `max_numel` elements, split along dim 0 if necessary; a single row may be larger.

    `is_expert`: all tensors of an expert form one unit; otherwise each tensor is a unit.
    Raises ValueError naming the tensor if the sources overlap, or do not cover a destination.
    """
    senders, receivers = _by_rectangle(sources), _by_rectangle(destinations)
    groups: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[Overlap]] = {}
    for unit, (name, rectangles) in enumerate(receivers.items()):
        for one, other in combinations(senders.get(name, {}), 2):
            if intersect(one, other) is not None:
                shown = " and ".join(f"{start}+{shape}" for start, shape in (one, other))
                raise ValueError(f"{name}: two source rectangles overlap: {shown}")
        for overlap in _overlaps(name, senders.get(name, {}), rectangles):
            key = (0 if is_expert else unit, tuple(overlap.sources), tuple(overlap.destinations))
            groups.setdefault(key, []).append(overlap)
    return [group for (unit, *_), overlaps in groups.items() for group in _split(overlaps, unit, max_numel)]


def intersect(one: Rectangle, other: Rectangle) -> Rectangle | None:
    start = tuple(map(max, one[0], other[0]))
    ends = (min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    shape = tuple(end - first for end, first in zip(ends, start, strict=True))
    return None if any(size <= 0 for size in shape) else (start, shape)


def _by_rectangle(
    slices: Iterable[tuple[int, ShardSlice]],
) -> dict[str, dict[Rectangle, list[tuple[int, ShardSlice]]]]:
    by_name: dict[str, dict[Rectangle, list[tuple[int, ShardSlice]]]] = {}
    for coordinate, part in slices:
        by_name.setdefault(part.name, {}).setdefault((part.start, part.shape), []).append((coordinate, part))
    return by_name


def _overlaps(
    name: str,
    sources: Mapping[Rectangle, Sequence[tuple[int, ShardSlice]]],
    destinations: Mapping[Rectangle, Sequence[tuple[int, ShardSlice]]],
) -> Iterator[Overlap]:
    # a coordinate that keeps a region twice is in two entries
    regions: dict[tuple[Rectangle, int], tuple[dict[int, ShardSlice], dict[int, ShardSlice]]] = {}
    for wanted, keepers in destinations.items():
        covered = 0
        for rectangle, holders in sources.items():
            if (region := intersect(rectangle, wanted)) is None:
                continue
            covered += prod(region[1])
            senders = dict(reversed(holders))  # the first slice of a rank that has several
            for coordinate, part in keepers:
                entries = (regions.setdefault((region, number), (senders, {}))[1] for number in count())
                next(entry for entry in entries if coordinate not in entry)[coordinate] = part
        if covered != prod(wanted[1]):
            raise ValueError(
                f"{name}: the engine keeps {prod(wanted[1])} elements from {wanted[0]} of shape {wanted[1]}, "
                f"but the trainer holds {covered} of them"
            )
    for ((start, shape), _), (senders, receivers) in regions.items():
        yield Overlap(name, start, shape, dict(sorted(senders.items())), receivers)


def _split(overlaps: Sequence[Overlap], unit: int, max_numel: int) -> Iterator[TransferGroup]:
    if sum(overlap.numel for overlap in overlaps) <= max_numel:
        yield TransferGroup(tuple(overlaps), unit)
        return
    for overlap in overlaps:
        start, shape = overlap.start, overlap.shape
        rows = max(1, max_numel // max(1, prod(shape[1:])))
        for first in range(0, shape[0], rows):
            region = {"start": (start[0] + first, *start[1:]), "shape": (min(rows, shape[0] - first), *shape[1:])}
            yield TransferGroup((replace(overlap, **region),), unit)
