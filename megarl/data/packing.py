"""Rows into micro-batches: under a token budget, ranks equally busy, the same number of micro-batches on every rank.

Pure: every rank computes the same plan from the same lengths.

    rows -> updates (groups stay together) -> ranks (equal cost) -> bins of at most `max_tokens`, in order

A row of L tokens costs L + L^2 / ATTENTION_LENGTH: matrices are linear in its length, attention is quadratic.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np

from megarl.config.schema import Train
from megarl.layout import Layout
from megarl.types import MicrobatchPlan, TokenBatch, TrainBatch

__all__ = ["first_fit_decreasing", "microbatch_multiple", "partition", "plan_microbatches", "plan_rows"]

Rows = tuple[int, ...]
PlannedRows = tuple[tuple[tuple[Rows, ...], ...], ...]  # [update][dp rank][micro-batch]

# Where attention costs as much as the matrices of its layer, about 12 hidden sizes; only the balance hangs on it.
ATTENTION_LENGTH = 24576


def plan_microbatches(
    batch: TokenBatch, layout: Layout, train: Train, *, units: Sequence[int] | None = None
) -> MicrobatchPlan:
    """The plan of one batch: which rows each rank runs in each micro-batch of each update.

    Rows of one unit (consecutive equal ids, such as the two rows of a preference pair) stay in one micro-batch.
    """
    lengths = batch.cu_seqlens.diff().tolist()
    rows = plan_rows(
        lengths,
        dp=layout.dp.size,
        updates=train.updates_per_step,
        max_tokens=train.max_tokens_per_microbatch,
        groups=batch.group.tolist() if isinstance(batch, TrainBatch) else units,
        units=units,
        multiple=microbatch_multiple(layout),
    )
    until = np.append(0, np.cumsum(batch.mask.numpy()))[batch.cu_seqlens.numpy()]
    trained = np.diff(until)
    num_tokens = tuple(int(sum(trained[list(bin)].sum() for rank in update for bin in rank)) for update in rows)
    return MicrobatchPlan(rows, num_tokens, _efficiency(rows, lengths))


def microbatch_multiple(layout: Layout) -> int:
    """What the number of micro-batches must be a multiple of: interleaved 1F1B asks for one of the pipeline size."""
    return layout.pp.size if layout.vpp.size > 1 else 1


def plan_rows(
    lengths: Sequence[int],
    *,
    dp: int,
    updates: int,
    max_tokens: int,
    groups: Sequence[int] | None = None,
    units: Sequence[int] | None = None,
    multiple: int = 1,
) -> PlannedRows:
    """``rows[update][dp_rank][microbatch]``; each row once. A row longer than `max_tokens` is alone in its bin.

    Rows of one group (consecutive equal ids) stay in one update, those of one unit in one micro-batch; fewer groups
    than `updates` make fewer updates.
    Every rank has the same number of micro-batches, a multiple of `multiple` (interleaved pipelines ask for one);
    where there are fewer rows than bins some are empty.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens_per_microbatch={max_tokens}; give a positive number of tokens")
    if units is not None:
        rows_of_unit = [tuple(rows) for _, rows in groupby(range(len(units)), key=lambda row: units[row])]
        planned = plan_rows(
            [sum(lengths[row] for row in rows) for rows in rows_of_unit],
            dp=dp,
            updates=updates,
            max_tokens=max_tokens,
            groups=None if groups is None else [groups[rows[0]] for rows in rows_of_unit],
            multiple=multiple,
        )
        return tuple(
            tuple(tuple(tuple(row for unit in bin for row in rows_of_unit[unit]) for bin in rank) for rank in update)
            for update in planned
        )
    parts = _split_groups(list(groups) if groups is not None else list(range(len(lengths))), updates)
    lengths_N = np.asarray(lengths, dtype=np.int64)
    return tuple(_plan_update(np.arange(part.start, part.stop), lengths_N, dp, max_tokens, multiple) for part in parts)


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


def _plan_update(
    rows: np.ndarray, lengths_N: np.ndarray, dp: int, max_tokens: int, multiple: int
) -> tuple[tuple[Rows, ...], ...]:
    lengths = lengths_N[rows]
    costs = _costs(lengths)
    ranks = [np.sort(np.asarray(part, dtype=np.int64)) for part in partition(costs, dp)]
    tight = [first_fit_decreasing(lengths[part], max_tokens) for part in ranks]
    most = max(max(len(bins) for bins in tight), 1)
    num_bins = -(-most // multiple) * multiple
    planned = []
    for part, fallback in zip(ranks, tight, strict=True):
        bins = _even_bins(lengths[part], costs[part], num_bins, max_tokens) or fallback
        filled = [tuple(sorted(rows[part[bin]].tolist())) for bin in bins if bin]
        planned.append(_pipeline_order(filled, lengths_N, num_bins))
    return tuple(planned)


def _costs(lengths: np.ndarray) -> np.ndarray:
    """Integers, so that every rank and machine breaks ties alike."""
    return lengths * ATTENTION_LENGTH + lengths * lengths


def first_fit_decreasing(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Items by index into the fewest bins first-fit-decreasing finds; one larger than `capacity` is alone.

    Bin after bin takes the largest item left that fits, which fills the same bins as the textbook's loop over items
    but looks each up by its size.
    """
    sized = np.minimum(np.asarray(lengths, dtype=np.int64), capacity)
    order = np.argsort(sized, kind="stable")
    starts = np.append(0, np.flatnonzero(np.diff(sized[order])) + 1)
    if not order.size:
        return []
    sizes = sized[order[starts]].tolist()  # distinct, ascending
    items, cuts = order.tolist(), [*starts.tolist(), order.size]
    left = [items[start:end] for start, end in pairwise(cuts)]  # the items of each size
    bins: list[list[int]] = []
    while sizes:
        room, taken, at = capacity, [], len(sizes) - 1
        while at >= 0:
            size, same = sizes[at], left[at]
            if size > room:
                at = bisect_right(sizes, room, 0, at) - 1
                continue
            count = min(room // size, len(same)) if size else len(same)
            taken += same[-count:]
            room -= count * size
            if count == len(same):
                del sizes[at], left[at]
            else:
                del same[-count:]
            at -= 1
        bins.append(taken)
    return bins


def partition(costs: Sequence[int] | np.ndarray, parts: int) -> list[list[int]]:
    """Items by index into `parts` of nearly equal cost: largest first to the least loaded, then swaps between the
    most and the least loaded part while they bring the two closer."""
    costs_N = np.asarray(costs, dtype=np.int64)
    members: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    cost_of = costs_N.tolist()
    for item in np.argsort(-costs_N, kind="stable").tolist():
        load, part = heap[0]
        members[part].append(item)
        heapq.heapreplace(heap, (load + cost_of[item], part))
    return _swapped(costs_N, [np.asarray(part, dtype=np.int64) for part in members])


def _swapped(costs_N: np.ndarray, members: list[np.ndarray], rounds: int = 1000) -> list[list[int]]:
    loads = np.array([costs_N[part].sum() for part in members])
    for _ in range(rounds):
        most, least = int(loads.argmax()), int(loads.argmin())
        swap = _best_swap(costs_N[members[most]], costs_N[members[least]], int(loads[most] - loads[least]))
        if swap is None:
            break
        i, j, moved = swap
        members[most][i], members[least][j] = members[least][j], members[most][i]
        loads[most] -= moved
        loads[least] += moved
    return [part.tolist() for part in members]


def _best_swap(high: np.ndarray, low: np.ndarray, gap: int) -> tuple[int, int, int] | None:
    """Which two items to exchange so that the gap comes nearest to 0, and by how much the load moves."""
    if gap < 2 or not low.size:
        return None
    order = np.argsort(low, kind="stable")
    above = np.searchsorted(low[order], high - gap // 2).clip(max=low.size - 1)
    near = np.stack([above, (above - 1).clip(min=0)])
    moved = high - low[order[near]]
    side, i = np.unravel_index(np.abs(2 * moved - gap).argmin(), moved.shape)
    best = int(moved[side, i])
    return (int(i), int(order[near[side, i]]), best) if 0 < best < gap else None


def _even_bins(lengths: np.ndarray, costs: np.ndarray, num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """`num_bins` bins of nearly equal cost within the token budget; None when that does not come out."""
    size_of, cost_of = lengths.tolist(), costs.tolist()
    room, bins = [max_tokens] * num_bins, [[] for _ in range(num_bins)]
    heap = [(0, index) for index in range(num_bins)]
    for item in np.argsort(-costs, kind="stable").tolist():
        full = []
        while heap and room[heap[0][1]] < min(size_of[item], max_tokens):
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, index = heap[0]
        bins[index].append(item)
        room[index] -= size_of[item]
        heapq.heapreplace(heap, (cost + cost_of[item], index))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _pipeline_order(bins: list[Rows], lengths_N: np.ndarray, num_bins: int) -> tuple[Rows, ...]:
    """Small ones first and last, where a pipeline fills and drains; like sizes at the same time on every rank."""
    rising = sorted(bins, key=lambda bin: (int(_costs(lengths_N[list(bin)]).sum()), bin))
    rising = [()] * (num_bins - len(rising)) + rising
    return tuple(rising[::2] + rising[1::2][::-1])


def _efficiency(rows: PlannedRows, lengths: Sequence[int]) -> float:
    """Real tokens over what the ranks would hold if each micro-batch were as full as the fullest rank's."""
    held = sum(
        len(update) * max(sum(lengths[row] for row in rows) for rows in at_once)
        for update in rows
        for at_once in zip(*update, strict=True)
    )
    return sum(lengths) / held if held else 1.0
