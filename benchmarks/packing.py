"""Rows into bins and bins to ranks: first fit decreasing against MFFD, our partition against verl's Karmarkar-Karp.

MFFD is written here from the published algorithm (Johnson and Garey, "A 71/60 theorem for bin packing", Journal of
Complexity 1, 1985); first fit itself uses a tree of the space left, without which it is quadratic. Compared is that
each item lies in one bin and that no bin overflows; `bins` and `over bound` measure the quality of the packing.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.frame import Case, Contender, Outcome
from benchmarks.peers import verl_module
from megarl.data.packing import first_fit_decreasing, partition

__all__ = ["CASES", "ffd", "mffd", "pack_mffd", "ranks", "verls_ranks"]

HERE = "benchmarks.packing"
CAPACITY = 16384
SIZES = (512, 2048, 8192, 32768, 100_000)

CASES = (
    *(
        Case(
            f"bins {items} rows up to {longest}",
            (Contender("megarl", f"{HERE}:ffd"), Contender("MFFD", f"{HERE}:mffd")),
            {"items": items, "longest": longest},
            at_least=1.0,
        )
        for longest in (CAPACITY // 2, CAPACITY)
        for items in SIZES
    ),
    *(
        Case(
            f"ranks {items} rows {parts} ranks, {what}",
            (
                Contender("megarl", f"{HERE}:ranks"),
                Contender("verl", f"{HERE}:verls_ranks", {"equal_size": equal}),
            ),
            {"items": items, "parts": parts},
            at_least=None if equal else 20.0 if items == 8192 else 1.0,
        )
        for what, equal in (("by cost", False), ("by cost, verl as many each", True))
        for items, parts in ((512, 8), (2048, 32), (8192, 64))
    ),
)


def _lengths(items: int, longest: int) -> np.ndarray:
    """Lognormal, median 1200, sigma 1."""
    drawn = np.random.Generator(np.random.PCG64(0)).lognormal(np.log(1200), 1.0, items)
    return drawn.astype(np.int64).clip(16, longest)


def _packed(
    pack: Callable[[Sequence[int], int], list[list[int]]], items: int, longest: int
) -> Callable[[], Outcome]:
    lengths_N = _lengths(items, longest)
    lengths = lengths_N.tolist()
    bound = -(-int(lengths_N.sum()) // CAPACITY)

    def call() -> Outcome:
        start = time.perf_counter()
        bins = pack(lengths, CAPACITY)
        seconds = time.perf_counter() - start
        fullest = max(int(lengths_N[bin].sum()) for bin in bins)
        packed = np.sort(np.concatenate([np.asarray(bin) for bin in bins]))
        figures = {"bins": len(bins), "over bound %": 100 * (len(bins) / bound - 1)}
        return Outcome(np.append(packed, fullest <= CAPACITY), seconds, figures)

    return call


def ffd(items: int, longest: int) -> Callable[[], Outcome]:
    return _packed(first_fit_decreasing, items, longest)


def mffd(items: int, longest: int) -> Callable[[], Outcome]:
    return _packed(pack_mffd, items, longest)


def pack_mffd(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Large items first, a bin each; then a medium item into each bin that has space, the fullest bin first; then two
    small ones, the emptiest bin first; then whatever fits, the fullest first; the rest by first fit decreasing.
    """
    rest = _Sorted(lengths, [item for item, length in enumerate(lengths) if length <= capacity / 2])
    large = sorted(
        (item for item, length in enumerate(lengths) if length > capacity / 2),
        key=lambda i: -lengths[i],
    )
    bins, room = [[item] for item in large], [capacity - lengths[item] for item in large]
    medium = rest.split(capacity / 3)
    for at, free in enumerate(room):
        if (item := medium.largest(free)) is not None:
            bins[at].append(item)
            room[at] -= lengths[item]
    small = rest.split(capacity / 6)
    for at in reversed([at for at, bin in enumerate(bins) if len(bin) == 1]):
        if len(small.items) > 1 and lengths[small.items[0]] + lengths[small.items[1]] <= room[at]:
            first = small.pop(0)
            second = small.largest(room[at] - lengths[first])
            assert second is not None
            bins[at] += [first, second]
            room[at] -= lengths[first] + lengths[second]
    rest = _Sorted(lengths, [*medium.items, *small.items, *rest.items])
    for at in range(len(bins)):
        while (item := rest.largest(room[at])) is not None:
            bins[at].append(item)
            room[at] -= lengths[item]
    return bins + _first_fit(lengths, rest.items[::-1], capacity)


class _Sorted:
    """Items in ascending order of length."""

    def __init__(self, lengths: Sequence[int], items: Sequence[int]) -> None:
        self._of = lengths
        self.items = sorted(items, key=lengths.__getitem__)
        self._lengths = [lengths[item] for item in self.items]

    def split(self, above: float) -> _Sorted:
        """Remove and return the items longer than `above`."""
        at = bisect_right(self._lengths, above)
        taken = _Sorted(self._of, self.items[at:])
        del self.items[at:], self._lengths[at:]
        return taken

    def largest(self, room: int) -> int | None:
        """Remove and return the largest item that fits."""
        at = bisect_right(self._lengths, room) - 1
        return None if at < 0 else self.pop(at)

    def pop(self, at: int) -> int:
        del self._lengths[at]
        return self.items.pop(at)


def _first_fit(lengths: Sequence[int], items: Sequence[int], capacity: int) -> list[list[int]]:
    """Each item into the first bin with space for it, located in a tree of the largest space in each half of bins."""
    leaves = 1 << max(1, len(items)).bit_length()
    most = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for item in items:
        length, at = lengths[item], 1
        while at < leaves:
            at *= 2
            if most[at] < length:
                at += 1
        if at - leaves == len(bins):
            bins.append([])
        bins[at - leaves].append(item)
        most[at] -= length
        while at > 1:
            at //= 2
            larger = max(most[2 * at], most[2 * at + 1])
            if most[at] == larger:
                break
            most[at] = larger
    return bins


def _ranked(split: Callable[[Sequence[int]], list[list[int]]], items: int) -> Callable[[], Outcome]:
    lengths_N = _lengths(items, CAPACITY // 2)
    costs_N = lengths_N * 24576 + lengths_N**2  # verl's workload of a row, and ours
    costs = costs_N.tolist()

    def call() -> Outcome:
        start = time.perf_counter()
        parts = split(costs)
        seconds = time.perf_counter() - start
        loads = np.array([costs_N[part].sum() for part in parts])
        members = np.sort(np.concatenate([np.asarray(part) for part in parts]))
        return Outcome(members, seconds, {"max over mean": float(loads.max() / loads.mean())})

    return call


def ranks(items: int, parts: int) -> Callable[[], Outcome]:
    return _ranked(lambda costs: partition(costs, parts), items)


def verls_ranks(items: int, parts: int, equal_size: bool) -> Callable[[], Outcome]:
    balance = verl_module("verl.utils.seqlen_balancing").get_seqlen_balanced_partitions
    return _ranked(lambda costs: balance(list(costs), parts, equal_size=equal_size), items)
