"""Ranges of consecutive numbers."""

from collections.abc import Iterable


def ranges_of(ids: Iterable[int]) -> list[list[int]]:
    """Returns [first, last] of each run of consecutive numbers."""
    ranges = []
    for number in sorted(ids):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges
