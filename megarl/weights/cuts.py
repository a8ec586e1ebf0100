"""Two tables cut against one another: what one layer of a kind moves between coordinates, once for all layers alike.

trainer's rules x engine's rules --cut--> bundles: regions of HF tensors with who holds and who keeps them
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from megarl.layout import Axis
from megarl.models.shards import Rule, ShardSlice
from megarl.weights.plan import intersect

__all__ = ["Bundle", "Cut", "cut_rules", "pitches"]


@dataclass(frozen=True, slots=True)
class Cut:
    """One region of one HF tensor (names not filled in), in a source's and in a destination's parameter."""

    source: ShardSlice
    destination: ShardSlice
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Bundle:
    """Regions that move together: whoever stands at one of `sources` can send them, all of `destinations` keep them.

    Coordinates are along the axis that splits the tensor, on either side. `is_expert`: once for each expert.
    """

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    cuts: tuple[Cut, ...]
    num_bytes: int
    unit: int  # order within a layer
    is_expert: bool


def cut_rules(
    source: Sequence[Rule],
    destination: Sequence[Rule],
    sizes: tuple[int, int],  # ranks along the axis, of source and destination
    *,
    itemsize: int,
    fp32: frozenset[str],
    is_expert: bool = False,
) -> list[Bundle]:
    """A bundle for each tensor, or for an expert as a whole.

    Raises ValueError naming the tensor when the source does not hold what the destination keeps.
    """
    held: dict[str, dict[ShardSlice, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, box in _boxes(source, sizes[0]):
        held[box.name][box].append(rank)
    kept: dict[ShardSlice, list[int]] = defaultdict(list)
    for rank, box in _boxes(destination, sizes[1]):
        kept[box].append(rank)
    order = {name: number for number, name in enumerate(dict.fromkeys(box.name for box in kept))}
    groups: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[Cut]] = defaultdict(list)
    for box, keepers in kept.items():
        found = 0
        for other, holders in held.get(box.name, {}).items():
            overlap = intersect(other, box)
            if overlap is not None:
                cut = Cut(other, box, *overlap)
                found += cut.numel
                unit = 0 if is_expert else order[box.name]
                groups[unit, tuple(holders), tuple(keepers)].append(cut)
        if found != box.numel:
            raise ValueError(f"{box.name}: the engine keeps {box.numel} elements of it, the trainer holds {found}")
    return [
        Bundle(holders, keepers, tuple(cuts), _num_bytes(cuts, itemsize, fp32), unit, is_expert)
        for (unit, holders, keepers), cuts in groups.items()
    ]


def pitches(rules: Sequence[Rule], size: int) -> dict[str, int]:
    """Elements of one expert in each parameter of these rules, on any rank of an axis of `size`."""
    found: dict[str, int] = defaultdict(int)
    for rule in rules:
        for box in rule.slices(Axis(size)):
            found[box.param] += box.numel
    return dict(found)


def _boxes(rules: Sequence[Rule], size: int) -> Iterator[tuple[int, ShardSlice]]:
    for rank in range(size):
        for rule in rules:
            for box in rule.slices(Axis(size, rank)):
                yield rank, box


def _num_bytes(cuts: Sequence[Cut], itemsize: int, fp32: frozenset[str]) -> int:
    return sum(cut.numel * (4 if cut.source.name in fp32 else itemsize) for cut in cuts)
