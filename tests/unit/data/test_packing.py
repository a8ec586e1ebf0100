"""Micro-batch plans: every row once, the budget kept, ranks equal and evenly loaded."""

from __future__ import annotations

import random
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st
from sample_rows import batch_of, sample

from megarl.config.schema import Train
from megarl.data.packing import plan_microbatches, plan_rows
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
    plan = plan_rows([8] * 32, dp=2, updates=4, max_tokens=32, groups=[row // 4 for row in range(32)])
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
        plan = plan_microbatches(batch, layout, Train(max_tokens_per_microbatch=8192, updates_per_step=2))
        assert plan.efficiency > 0.95, f"dp={dp}"
        assert sum(plan.num_tokens) == int(batch.mask.sum())
        for update in plan.rows:
            loads = [sum(lengths[row] for bin in rank for row in bin) for rank in update]
            assert max(loads) < 1.03 * min(loads)


def test_the_fullest_microbatch_goes_to_the_least_loaded_rank():
    plan = plan_rows([10, 8, 6, 4], dp=2, updates=1, max_tokens=10)
    assert plan == ((((0,), (3,)), ((1,), (2,))),)  # 14 tokens each


def test_efficiency_is_real_over_held():
    batch = batch_of(sample(".xxx"), sample(".x"))  # 4 and 2 tokens on two ranks
    plan = plan_microbatches(batch, Layout.of(Parallel(), 2, 0), Train(max_tokens_per_microbatch=8))
    assert plan.efficiency == 6 / 8
    assert plan.num_tokens == (4,)
