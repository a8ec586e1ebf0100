"""Rows into micro-batches: under a token budget, balanced over data parallel ranks, the same count on every rank.

Pure: every rank computes the same plan from the same lengths.

    rows -> updates (groups stay together) -> bins of at most `max_tokens` -> ranks (evenly loaded)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megarl.config.schema import Train
from megarl.layout import Layout
from megarl.types import MicrobatchPlan, TrainBatch

__all__ = ["plan_microbatches", "plan_rows"]

Rows = tuple[int, ...]
PlannedRows = tuple[tuple[tuple[Rows, ...], ...], ...]  # [update][dp rank][micro-batch]


def plan_microbatches(batch: TrainBatch, layout: Layout, train: Train) -> MicrobatchPlan:
    """The plan of one rollout batch: which rows each rank runs in each micro-batch of each update."""
    lengths = batch.cu_seqlens.diff().tolist()
    rows = plan_rows(
        lengths,
        dp=layout.dp.size,
        updates=train.updates_per_step,
        max_tokens=train.max_tokens_per_microbatch,
        groups=batch.group.tolist(),
    )
    trained = [int(part.sum()) for part in batch.mask.split(lengths)]
    num_tokens = tuple(sum(trained[row] for rank in update for bin in rank for row in bin) for update in rows)
    return MicrobatchPlan(rows, num_tokens, _efficiency(rows, lengths))


def plan_rows(
    lengths: Sequence[int], *, dp: int, updates: int, max_tokens: int, groups: Sequence[int] | None = None
) -> PlannedRows:
    """``rows[update][dp_rank][microbatch]``; each row once. A row longer than `max_tokens` is alone in its bin.

    Rows of one group (consecutive equal ids) stay in one update; fewer groups than `updates` make fewer updates.
    Every rank has the same number of micro-batches; where there are fewer rows than bins some are empty.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens_per_microbatch={max_tokens}; give a positive number of tokens")
    parts = _split_groups(list(groups) if groups is not None else list(range(len(lengths))), updates)
    return tuple(_deal(_pack([(lengths[row], row) for row in part], dp, max_tokens), lengths, dp) for part in parts)


def _split_groups(groups: list[int], updates: int) -> list[range]:
    """Consecutive rows into at most `updates` parts of nearly equal row counts, cut only between groups."""
    starts = [row for row in range(len(groups)) if row == 0 or groups[row] != groups[row - 1]] + [len(groups)]
    parts, start = [], 0
    for left in range(updates, 0, -1):
        target = start + (len(groups) - start) / left
        end = min((cut for cut in starts if cut > start), key=lambda cut: abs(cut - target), default=start)
        if end > start:
            parts.append(range(start, end))
        start = end
    return parts or [range(0)]


def _pack(sized: list[tuple[int, int]], dp: int, max_tokens: int) -> list[list[int]]:
    """The fewest bins, a multiple of `dp`, that longest-first into the emptiest bin fills within the budget."""
    longest_first = sorted(sized, key=lambda item: (-item[0], item[1]))
    total = sum(min(size, max_tokens) for size, _ in sized)
    num_bins = max(-(-total // (dp * max_tokens)), 1) * dp
    while True:
        heap, bins = [(0, index) for index in range(num_bins)], [[] for _ in range(num_bins)]
        for size, row in longest_first:
            used, index = heapq.heappop(heap)
            if used and used + size > max_tokens:
                break  # even the emptiest bin has no room
            bins[index].append(row)
            heapq.heappush(heap, (used + size, index))
        else:
            return bins
        num_bins += dp


def _deal(bins: list[list[int]], lengths: Sequence[int], dp: int) -> tuple[tuple[Rows, ...], ...]:
    """Bins to ranks. Ranks run bins of like size at the same time, and the fullest goes to the least loaded."""
    sizes = [sum(lengths[row] for row in rows) for rows in bins]
    order = sorted(range(len(bins)), key=lambda index: (-sizes[index], index))
    ranks: list[list[Rows]] = [[] for _ in range(dp)]
    loads = [0] * dp
    for first in range(0, len(order), dp):
        least_loaded = sorted(range(dp), key=lambda rank: (loads[rank], rank))
        for index, rank in zip(order[first : first + dp], least_loaded, strict=True):
            ranks[rank].append(tuple(sorted(bins[index])))
            loads[rank] += sizes[index]
    return tuple(tuple(rank) for rank in ranks)


def _efficiency(rows: PlannedRows, lengths: Sequence[int]) -> float:
    """Real tokens over what the ranks would hold if each micro-batch were as full as the fullest rank's."""
    held = sum(
        len(update) * max(sum(lengths[row] for row in rows) for rows in at_once)
        for update in rows
        for at_once in zip(*update, strict=True)
    )
    return sum(lengths) / held if held else 1.0
