"""Packs rows into micro-batches under a token budget, with nearly equal cost and the same number of
micro-batches on every rank.

    rows -> updates (groups stay together) -> ranks (equal cost) -> bins of `max_tokens`, in order

A row of L tokens costs L + L^2 / ATTENTION_LENGTH, because matrix products are linear in its length
and attention is quadratic. The functions are pure: every rank computes the same plan from the same
lengths.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from random import Random

import numpy as np

from megarl.config.schema import Train
from megarl.layout import Layout
from megarl.types import MicrobatchPlan, PreferenceBatch, TokenBatch, TrainBatch

RowIndices = tuple[int, ...]
Bins = list[list[int]]  # indices of the items in each bin
PlannedRows = tuple[tuple[tuple[RowIndices, ...], ...], ...]  # [update][dp rank][micro-batch]

# tokens at which attention costs as much as a layer's matrix products: about 12 x the hidden size
ATTENTION_LENGTH = 24576
MAX_SWAPS = 1000


def plan_microbatches(
    batch: TokenBatch,
    layout: Layout,
    train: Train,
    *,
    units: Sequence[int] | None = None,
    shuffle: str | None = None,
) -> MicrobatchPlan:
    """Plans which rows each data-parallel rank runs in each micro-batch of each update.

    Rows of one unit (consecutive equal ids; the groups of a PreferenceBatch) stay in one
    micro-batch. `shuffle` seeds a random order of groups; None keeps the order of the batch.
    """
    units = batch.group.tolist() if isinstance(batch, PreferenceBatch) else units
    lengths = batch.cu_seqlens.diff().tolist()
    rows = plan_rows(
        lengths,
        dp=layout.dp.size,
        updates=train.updates_per_step,
        max_tokens=train.max_tokens_per_microbatch,
        groups=batch.group.tolist() if isinstance(batch, TrainBatch) else units,
        units=units,
        multiple=microbatch_multiple(layout),
        shuffle=shuffle,
    )
    padded = 0  # number of tokens if every micro-batch were as full as that of the fullest rank
    for update in rows:
        for microbatch in zip(*update, strict=True):
            padded += len(update) * max(_sum_of(lengths, bin) for bin in microbatch)
    return MicrobatchPlan(rows, sum(lengths) / padded if padded else 1.0)


def _sum_of(numbers: Sequence[int], rows: Iterable[int]) -> int:
    return sum(numbers[row] for row in rows)


def microbatch_multiple(layout: Layout) -> int:
    """Returns a required divisor of the number of micro-batches: the pipeline size for interleaved
    1F1B, else 1.
    """
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
    shuffle: str | None = None,
) -> PlannedRows:
    """Returns ``rows[update][dp_rank][microbatch]``, which contains every row once.

    Rows of one group (consecutive equal ids) stay in one update, so there may be fewer updates than
    `updates`. Rows of one unit stay in one micro-batch. Every rank has the same number of
    micro-batches, a multiple of `multiple`; some are empty if there are too few rows. A row (or
    unit) longer than `max_tokens` has a micro-batch to itself.
    """
    all_rows = range(len(lengths))
    row_units = units or all_rows
    row_groups = groups or all_rows
    rows_of_unit = [tuple(rows) for _, rows in groupby(all_rows, key=lambda row: row_units[row])]
    if shuffle is not None:
        by_group = groupby(rows_of_unit, key=lambda rows: row_groups[rows[0]])
        units_of_group = [list(part) for _, part in by_group]
        Random(shuffle).shuffle(units_of_group)
        rows_of_unit = list(chain.from_iterable(units_of_group))
    lengths_U = np.array([_sum_of(lengths, rows) for rows in rows_of_unit], dtype=np.int64)

    def rows_of_bin(units: RowIndices) -> RowIndices:
        return tuple(chain.from_iterable(rows_of_unit[unit] for unit in units))

    planned = []
    for part in _split_groups([row_groups[rows[0]] for rows in rows_of_unit], updates):
        part_units = np.array(part, np.int64)
        part_lengths = lengths_U[part_units]
        costs = _costs(part_lengths)
        ranks = [sorted(items) for items in partition(costs, dp)]
        fewest_bins = [first_fit_decreasing(part_lengths[items], max_tokens) for items in ranks]
        num_bins = -(-max(1, *map(len, fewest_bins)) // multiple) * multiple
        update = []
        for items, fallback in zip(ranks, fewest_bins, strict=True):
            bins = _even_bins(part_lengths[items], costs[items], num_bins, max_tokens) or fallback
            rank_units = part_units[items]
            filled = [tuple(sorted(rank_units[bin].tolist())) for bin in bins if bin]
            update.append(tuple(map(rows_of_bin, _pipeline_order(filled, lengths_U, num_bins))))
        planned.append(tuple(update))
    return tuple(planned)


def _split_groups(groups: Sequence[int], updates: int) -> list[range]:
    """Splits rows into at most `updates` ranges of nearly equal size without splitting a group."""
    boundaries = [row for row in range(1, len(groups)) if groups[row] != groups[row - 1]]
    boundaries.append(len(groups))
    ranges = []
    start = 0
    for remaining in range(updates, 0, -1):
        target = start + (len(groups) - start) / remaining
        end = min(
            (row for row in boundaries if row > start),
            key=lambda row: abs(row - target),
            default=start,
        )
        if end > start:
            ranges.append(range(start, end))
        start = end
    return ranges or [range(0)]


def _costs(lengths: np.ndarray) -> np.ndarray:
    """Returns costs as integers, so that every rank and machine breaks ties the same way."""
    return lengths * ATTENTION_LENGTH + lengths * lengths


def first_fit_decreasing(lengths: Sequence[int] | np.ndarray, capacity: int) -> Bins:
    """Packs items by first-fit-decreasing; returns bins of item indices. An item larger than
    `capacity` gets a separate bin.
    """
    # fills one bin after the other with the largest remaining item that fits, which gives the same
    # bins as the usual loop over items
    capped_N = np.minimum(lengths, capacity)
    order = np.argsort(capped_N, kind="stable")
    items = order.tolist()
    sizes = capped_N[order].tolist()
    bins = []
    while sizes:
        members = []
        room = capacity
        index = len(sizes) - 1
        while index >= 0:
            members.append(items.pop(index))
            room -= sizes.pop(index)
            index = bisect_right(sizes, room) - 1
        bins.append(members)
    return bins


def partition(costs: Sequence[int] | np.ndarray, parts: int) -> Bins:
    """Partitions items, given by index, into `parts` lists of nearly equal cost.

    Assigns the largest items first, then improves the result by swaps.
    """
    costs_N = np.asarray(costs, dtype=np.int64)
    assigned = _even_bins(np.zeros_like(costs_N), costs_N, parts, 0) or []
    members = [np.asarray(part, dtype=np.int64) for part in assigned]
    loads = np.array([costs_N[part].sum() for part in members])
    for _ in range(MAX_SWAPS):
        most = int(loads.argmax())
        least = int(loads.argmin())
        swap = _best_swap(
            costs_N[members[most]], costs_N[members[least]], int(loads[most] - loads[least])
        )
        if swap is None:
            break
        i, j, difference = swap
        members[most][i], members[least][j] = members[least][j], members[most][i]
        loads[most] -= difference
        loads[least] += difference
    return [part.tolist() for part in members]


def _best_swap(high: np.ndarray, low: np.ndarray, gap: int) -> tuple[int, int, int] | None:
    """Returns (index in `high`, index in `low`, difference in cost) of the swap that brings the gap
    between the two loads closest to 0, or None if no swap reduces the gap.
    """
    if gap < 2 or not low.size:
        return None
    order = np.argsort(low, kind="stable")
    above = np.searchsorted(low[order], high - gap // 2).clip(max=low.size - 1)
    near = np.stack([above, (above - 1).clip(min=0)])
    differences = high - low[order[near]]
    side, i = np.unravel_index(np.abs(2 * differences - gap).argmin(), differences.shape)
    best = int(differences[side, i])
    return (int(i), int(order[near[side, i]]), best) if 0 < best < gap else None


def _even_bins(
    lengths: np.ndarray, costs: np.ndarray, num_bins: int, max_tokens: int
) -> Bins | None:
    """Packs items into `num_bins` bins of nearly equal cost within the token budget; returns None
    if the greedy search fails.
    """
    bins = [[] for _ in range(num_bins)]
    room_B = np.full(num_bins, max_tokens)
    cost_B = np.zeros(num_bins, np.int64)
    for item in np.argsort(-costs, kind="stable").tolist():
        fitting = np.flatnonzero(room_B >= min(lengths[item], max_tokens))
        if not fitting.size:
            return None
        index = fitting[cost_B[fitting].argmin()]
        bins[index].append(item)
        room_B[index] -= lengths[item]
        cost_B[index] += costs[item]
    return bins


def _pipeline_order(
    bins: list[RowIndices], lengths_N: np.ndarray, num_bins: int
) -> tuple[RowIndices, ...]:
    """Orders bins so that small ones come first and last, where a pipeline fills and drains, and
    all ranks run bins of similar cost at the same time.
    """
    by_cost = sorted(bins, key=lambda bin: (int(_costs(lengths_N[list(bin)]).sum()), bin))
    by_cost = [()] * (num_bins - len(by_cost)) + by_cost
    return tuple(by_cost[::2] + by_cost[1::2][::-1])
