"""Micro-batch plans: every row once, the budget kept, ranks equal and evenly loaded."""

from __future__ import annotations

import random
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_rows import batch_of, sample

from megarl.config.schema import Train
from megarl.data.packing import (
    ATTENTION_LENGTH,
    first_fit_decreasing,
    microbatch_multiple,
    partition,
    plan_microbatches,
    plan_rows,
)
from megarl.layout import Layout, Parallel

lengths_st = st.lists(st.integers(1, 60), max_size=40)


@given(lengths_st, st.integers(1, 5), st.integers(1, 4), st.integers(1, 80), st.integers(1, 6))
def test_invariants(lengths, dp, updates, max_tokens, group_size):
    groups = [row // group_size for row in range(len(lengths))]
    plan = plan_rows(lengths, dp=dp, updates=updates, max_tokens=max_tokens, groups=groups)
    bins = [bin for update in plan for rank in update for bin in rank]
    assert sorted(chain.from_iterable(bins)) == list(range(len(lengths)))  # each row once
    for update in plan:
        assert len(update) == dp
        assert len({len(rank) for rank in update}) == 1  # as many micro-batches on every rank
    for bin in bins:
        assert sum(lengths[row] for row in bin) <= max_tokens or len(bin) == 1
    of_update = [{groups[row] for rank in update for bin in rank for row in bin} for update in plan]
    assert sum(map(len, of_update)) == len(set(groups))  # no group in two updates
    assert 1 <= len(plan) <= updates
    assert plan == plan_rows(lengths, dp=dp, updates=updates, max_tokens=max_tokens, groups=groups)


def test_equal_groups_make_equal_updates():
    plan = plan_rows(
        [8] * 32, dp=2, updates=4, max_tokens=32, groups=[row // 4 for row in range(32)]
    )
    assert [sum(len(bin) for rank in update for bin in rank) for update in plan] == [8, 8, 8, 8]


def test_fewer_groups_than_updates():
    assert len(plan_rows([3] * 8, dp=1, updates=4, max_tokens=32, groups=[0] * 4 + [1] * 4)) == 2


def test_a_row_longer_than_the_budget_is_alone():
    plan = plan_rows([100, 4, 4], dp=1, updates=1, max_tokens=16)
    assert sorted(plan[0][0]) == [(0,), (1, 2)]


def test_fewer_rows_than_ranks_leaves_empty_microbatches():
    plan = plan_rows([5, 6], dp=4, updates=1, max_tokens=16)
    assert [len(rank) for rank in plan[0]] == [1, 1, 1, 1]
    assert sum(bin == () for rank in plan[0] for bin in rank) == 2


def test_no_rows():
    assert plan_rows([], dp=2, updates=2, max_tokens=8) == ((((),), ((),)),)


def test_ranks_are_evenly_loaded():
    draw = random.Random(0)
    lengths = [min(int(draw.lognormvariate(6, 1)), 4000) for _ in range(512)]
    batch = batch_of(*(sample("." + "x" * length) for length in lengths))
    for dp in (1, 2, 4, 8):
        layout = Layout.of(Parallel(), dp, 0)
        plan = plan_microbatches(
            batch, layout, Train(max_tokens_per_microbatch=8192, updates_per_step=2)
        )
        assert plan.efficiency > 0.95, f"dp={dp}"
        for update in plan.rows:
            loads = [sum(lengths[row] for bin in rank for row in bin) for rank in update]
            assert max(loads) < 1.03 * min(loads)


def test_ranks_hold_equal_cost_and_pipelines_fill_and_drain_on_small_ones():
    plan = plan_rows([10, 8, 6, 4], dp=2, updates=1, max_tokens=10)
    assert plan == ((((3,), (0,)), ((2,), (1,))),)  # 14 tokens each
    ((rank,),) = plan_rows([5, 9, 7, 6, 8], dp=1, updates=1, max_tokens=9)
    assert rank == ((0,), (2,), (1,), (4,), (3,))


def test_a_long_row_weighs_more_than_its_tokens():
    lengths = [20_000, *[100] * 600]
    ranks = plan_rows(lengths, dp=2, updates=1, max_tokens=20_000)[0]
    tokens = [sum(lengths[row] for bin in rank for row in bin) for rank in ranks]
    # the rank with the long row; equal tokens would leave it the last to finish
    assert tokens[0] < tokens[1]
    cost = [
        sum(lengths[row] + lengths[row] ** 2 / ATTENTION_LENGTH for bin in rank for row in bin)
        for rank in ranks
    ]
    assert max(cost) < 1.01 * min(cost)


def test_shuffled_groups_stay_whole():
    groups, units = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5], [0, 0, 1, 1, 2, 3, 4, 5, 6, 6, 7, 7]
    options = {"dp": 2, "updates": 3, "max_tokens": 16, "groups": groups, "units": units}
    in_order, *shuffled = (
        plan_rows([4] * 12, **options, shuffle=seed) for seed in (None, "a", "a", "b")
    )
    assert shuffled[0] == shuffled[1] != shuffled[2] and in_order not in shuffled
    for plan in shuffled:
        updates = [[row for rank in update for bin in rank for row in bin] for update in plan]
        assert sorted(row for update in updates for row in update) == list(range(12))
        assert sorted(sorted({groups[row] for row in update}) for update in updates) != [
            [0, 1],
            [2, 3],
            [4, 5],
        ]
        assert sum(len({groups[row] for row in update}) for update in updates) == 6, (
            "no group is split"
        )
        bins = [bin for update in plan for rank in update for bin in rank]
        assert all({0, 1} <= set(bin) for bin in bins if 0 in bin), "one unit, one micro-batch"


def test_interleaved_pipelines_get_a_multiple_of_their_stages():
    plan = plan_rows([8] * 10, dp=2, updates=1, max_tokens=16, multiple=4)
    assert [len(rank) for rank in plan[0]] == [4, 4]
    sizes = [Parallel(pipeline=4), Parallel(pipeline=4, virtual_pipeline=2)]
    assert [microbatch_multiple(Layout.of(size, 4, 0)) for size in sizes] == [1, 4]


def lognormal(count: int, seed: int = 0) -> np.ndarray:
    draws = np.random.default_rng(seed).normal(np.log(1200), 1, count)
    return np.exp(draws).clip(16, 8192).astype(np.int64)


@given(st.lists(st.integers(1, 30), max_size=60), st.integers(1, 40))
def test_bins_are_those_of_the_textbook(lengths, capacity):
    found = first_fit_decreasing(lengths, capacity)
    assert sorted(chain.from_iterable(found)) == list(range(len(lengths)))
    rooms: list[int] = []  # first fit decreasing, item by item
    for length in sorted((min(length, capacity) for length in lengths), reverse=True):
        at = next((i for i, room in enumerate(rooms) if room >= length), len(rooms))
        rooms[at : at + 1] = [(rooms[at] if at < len(rooms) else capacity) - length]
    assert sorted(rooms) == sorted(
        capacity - sum(min(lengths[i], capacity) for i in items) for items in found
    )


@pytest.mark.parametrize("count", [512, 8192])
def test_bins_reach_the_lower_bound(count):
    lengths = lognormal(count)
    assert len(first_fit_decreasing(lengths, 16384)) <= 1.001 * -(-lengths.sum() // 16384)


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_a_partition_holds_every_item_once(costs, parts):
    found = partition(costs, parts)
    assert len(found) == parts
    assert sorted(chain.from_iterable(found)) == list(range(len(costs)))


def test_parts_cost_the_same():
    lengths = lognormal(8192)
    loads = [lengths[part].sum() for part in partition(lengths, 64)]
    assert max(loads) <= 1.00001 * np.mean(loads)


def test_efficiency_is_real_over_held():
    batch = batch_of(sample(".xxx"), sample(".x"))  # 4 and 2 tokens on two ranks
    plan = plan_microbatches(batch, Layout.of(Parallel(), 2, 0), Train(max_tokens_per_microbatch=8))
    assert plan.efficiency == 6 / 8


def test_rows_of_a_unit_stay_in_one_micro_batch() -> None:
    """Pairs of rows, two pairs a group: no pair is torn apart, no group is spread over two updates."""
    lengths, units = [5 + 3 * (row % 4) for row in range(16)], [row // 2 for row in range(16)]
    groups = [row // 4 for row in range(16)]
    planned = plan_rows(lengths, dp=2, updates=2, max_tokens=60, groups=groups, units=units)
    bins = [bin for update in planned for rank in update for bin in rank]
    assert sorted(row for bin in bins for row in bin) == list(range(16)) and len(bins) >= 4
    for bin in bins:
        assert sum(lengths[row] for row in bin) <= 60
        assert all(row ^ 1 in bin for row in bin)
    in_update = [{row // 4 for rank in update for bin in rank for row in bin} for update in planned]
    assert len(in_update) == 2 and not in_update[0] & in_update[1]
