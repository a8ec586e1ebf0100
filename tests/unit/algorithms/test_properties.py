"""What must hold of every algorithm whatever the numbers: order, padding, splits and masked positions do not matter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reduced import AGGREGATIONS, CORRECTIONS, LOSSES, WEIGHTS
from torch import Tensor

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.kl import KL
from megarl.algorithms.losses import clipped_value_loss
from megarl.algorithms.whitening import Stats, whiten, whiten_stats
from megarl.data.packing import plan_rows

ROW_ADVANTAGES = ("grpo", "rloo", "dr_grpo", "opo", "gpg", "reinforce_pp_baseline")


@dataclass(frozen=True)
class Rows:
    """A ragged batch with holes, empty rows and groups of any size; fp64."""

    mask: Tensor
    cu: Tensor
    group: Tensor
    rewards: Tensor
    step_ends: Tensor
    baseline: Tensor
    values: Tensor
    new: Tensor
    old: Tensor
    rollout: Tensor

    @property
    def spans(self) -> list[slice]:
        return [
            slice(a, b) for a, b in zip(self.cu[:-1].tolist(), self.cu[1:].tolist(), strict=True)
        ]

    def reordered(self, order: list[int]) -> Rows:
        """The same rows in another order."""
        per_token = {
            name: torch.cat([getattr(self, name)[self.spans[row]] for row in order])
            for name in ("mask", "rewards", "step_ends", "values", "new", "old", "rollout")
        }
        lengths = torch.tensor(
            [0, *(self.spans[row].stop - self.spans[row].start for row in order)]
        )
        return Rows(
            **per_token,
            cu=lengths.cumsum(0),
            group=self.group[order],
            baseline=self.baseline[order],
        )

    def poisoned(self) -> Rows:
        """NaN and infinities at every masked position."""

        def poison(x: Tensor, what: float) -> Tensor:
            return torch.where(self.mask, x, what)

        return replace(
            self,
            rewards=poison(self.rewards, float("nan")),
            values=poison(self.values, float("inf")),
            new=poison(self.new, float("nan")),
            old=poison(self.old, float("-inf")),
            rollout=poison(self.rollout, float("nan")),
            step_ends=self.step_ends | ~self.mask,
        )


@st.composite
def batches(draw) -> Rows:
    num_rows = draw(st.integers(1, 7))
    lengths = draw(st.lists(st.integers(1, 9), min_size=num_rows, max_size=num_rows))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))

    def normal(count: int) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    total = sum(lengths)
    mask = torch.rand(total, generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.0]))
    cu = torch.tensor([0, *lengths]).cumsum(0)
    if draw(st.booleans()):
        mask[: lengths[0]] = False  # a row that sampled nothing
    old = -normal(total).abs()
    return Rows(
        mask=mask,
        cu=cu,
        group=torch.tensor(draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows)))
        * 11,
        rewards=normal(total).round() * mask,
        step_ends=mask & (torch.rand(total, generator=generator) < 0.4),
        baseline=normal(num_rows),
        values=normal(total),
        new=old + 0.3 * normal(total),
        old=old,
        rollout=old + 0.1 * normal(total),
    )


def advantages(name: str, rows: Rows, **options) -> Tensor:
    more = {"values_T": rows.values, "step_ends_T": rows.step_ends, "baseline_N": rows.baseline}
    return ADVANTAGES[name](rows.rewards, rows.mask, rows.cu, rows.group, **more, **options)


def row_advantages(rows: Rows) -> Tensor:
    """One advantage a row, as gspo wants."""
    return ADVANTAGES["dr_grpo"](rows.rewards, rows.mask, rows.cu, rows.group, singleton="raw")


def losses(name: str, rows: Rows) -> tuple[Tensor, Tensor]:
    """(loss_T, gradient of its sum)."""
    logprobs = rows.new.clone().requires_grad_()
    clean = replace(rows, rewards=torch.where(rows.mask, rows.rewards, 0))
    # poisoned where the batch is
    given_T = torch.where(rows.mask, row_advantages(clean), rows.rewards)
    loss_T = LOSSES[name](logprobs, rows.old, given_T, rows.mask, rows.cu)
    loss_T.sum().backward()
    return loss_T.detach(), logprobs.grad


def corrections(name: str, rows: Rows) -> Tensor:
    now = {"logprobs_T": rows.new, "advantages_T": rows.rewards}
    return CORRECTIONS[name](rows.old, rows.rollout, rows.mask, rows.cu, **now)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(batches(), st.randoms())
def test_advantages_do_not_depend_on_the_order_of_rows(name, rows, random):
    order = list(range(len(rows.spans)))
    random.shuffle(order)
    ours = advantages(name, rows)
    shuffled = torch.cat([ours[rows.spans[row]] for row in order])
    torch.testing.assert_close(
        advantages(name, rows.reordered(order)), shuffled, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("name", ADVANTAGES)
@given(batches())
def test_nothing_at_masked_positions_reaches_advantages(name, rows):
    ours = advantages(name, rows)
    assert ours.isfinite().all() and not ours[~rows.mask].any()
    assert torch.equal(advantages(name, rows.poisoned()), ours)


@pytest.mark.parametrize("name", LOSSES)
@given(batches())
def test_nothing_at_masked_positions_reaches_losses_or_gradients(name, rows):
    for ours, poisoned in zip(losses(name, rows), losses(name, rows.poisoned()), strict=True):
        assert ours.isfinite().all() and not ours[~rows.mask].any()
        assert torch.equal(poisoned, ours)


@pytest.mark.parametrize("name", CORRECTIONS)
@given(batches())
def test_nothing_at_masked_positions_reaches_corrections(name, rows):
    ours = corrections(name, rows)
    assert ours.isfinite().all() and not ours[~rows.mask].any()
    assert torch.equal(corrections(name, rows.poisoned()), ours)


@pytest.mark.parametrize("name", WEIGHTS)
@given(batches(), st.integers(1, 3), st.integers(1, 3), st.integers(4, 40))
def test_any_packing_gives_the_loss_of_the_whole(name, rows, dp, updates, max_tokens):
    weights = WEIGHTS[name](rows.mask, rows.cu, rows.group, constant=16)
    whole = AGGREGATIONS[name](rows.new, rows.mask, rows.cu, rows.group, constant=16)
    plan = plan_rows(rows.cu.diff().tolist(), dp=dp, updates=updates, max_tokens=max_tokens)
    parts = torch.zeros((), dtype=torch.float64)
    for row in [row for update in plan for rank in update for bin in rank for row in bin]:
        part = rows.spans[row]
        loss_T = torch.where(rows.mask, rows.new, 0)[part]
        parts = parts + (loss_T * weights[part]).sum()
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    assert not weights[~rows.mask].any()


@pytest.mark.parametrize("name", LOSSES)
@given(batches(), st.randoms())
def test_a_micro_batch_of_whole_rows_has_the_losses_of_the_batch(name, rows, random):
    order = list(range(len(rows.spans)))
    random.shuffle(order)
    chosen = order[: (len(order) + 1) // 2]
    advantages_T = row_advantages(rows)
    whole = LOSSES[name](rows.new, rows.old, advantages_T, rows.mask, rows.cu)
    part = rows.reordered(chosen)
    picked = torch.cat([advantages_T[rows.spans[row]] for row in chosen])
    ours = LOSSES[name](part.new, part.old, picked, part.mask, part.cu)
    torch.testing.assert_close(ours, torch.cat([whole[rows.spans[row]] for row in chosen]))


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=20)
@given(batches(), st.sampled_from([1, 2, 4]), st.sampled_from(sorted(WEIGHTS)), st.randoms())
def test_any_assignment_of_rows_to_ranks_gives_the_gradient_of_the_whole(
    name, rows, num_ranks, aggregation, random
):
    """Through a model of one table of logits; a rank's rows in any order, a rank may have none."""
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    theta = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    state_T, label_T = (torch.randint(0, n, rows.mask.shape, generator=generator) for n in (5, 7))
    advantages_T = row_advantages(rows)
    weights_T = WEIGHTS[aggregation](rows.mask, rows.cu, rows.group, constant=16) * corrections(
        "tis", rows
    )

    def gradient(order: list[int]) -> Tensor:
        if not order:
            return torch.zeros_like(theta)
        part, at = (
            rows.reordered(order),
            torch.cat([torch.arange(s.start, s.stop) for s in (rows.spans[r] for r in order)]),
        )
        table = theta.clone().requires_grad_()
        logprobs_T = table.log_softmax(-1)[state_T[at], label_T[at]]
        loss_T = LOSSES[name](logprobs_T, part.old, advantages_T[at], part.mask, part.cu)
        (loss_T * weights_T[at]).sum().backward()
        return table.grad

    ranks = [[] for _ in range(num_ranks)]
    order = list(range(len(rows.spans)))
    random.shuffle(order)
    for row in order:
        ranks[random.randrange(num_ranks)].append(row)
    total = sum(gradient(rank) for rank in ranks)
    torch.testing.assert_close(total, gradient(list(range(len(rows.spans)))), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ROW_ADVANTAGES)
@given(batches(), st.floats(-50, 50))
def test_a_shift_of_all_scores_changes_nothing(name, rows, shift):
    starts = torch.tensor([bool(rows.mask[span].any()) for span in rows.spans])
    shifted = rows.rewards.clone()
    for span, any_token in zip(rows.spans, starts.tolist(), strict=True):
        if any_token:
            shifted[span.start + int(rows.mask[span].nonzero()[-1])] += shift
    options = {"singleton": "zero"}
    ours, moved = (
        advantages(name, replace(rows, rewards=r), **options) for r in (rows.rewards, shifted)
    )
    torch.testing.assert_close(moved, ours, rtol=1e-6, atol=1e-6)


SCALE_FREE = (
    "grpo",
    "grpo_process",
    "reinforce_pp",
    "reinforce_pp_baseline",
)  # divided by a standard deviation


@pytest.mark.parametrize("name", ADVANTAGES)
@given(batches(), st.floats(0.01, 1000))
def test_scaled_rewards_scale_the_advantages_or_leave_them(name, rows, factor):
    """Exactly so without eps; values and baselines, which are in the units of rewards, scale along."""
    options = {"eps": 0.0} if name in SCALE_FREE else {}
    options |= {"whiten": False} if name == "gae" else {}
    options |= {"singleton": "zero"} if name in ROW_ADVANTAGES else {}
    scaled = replace(
        rows,
        rewards=factor * rows.rewards,
        values=factor * rows.values,
        baseline=factor * rows.baseline,
    )
    expected = advantages(name, rows, **options) * (1 if name in SCALE_FREE else factor)
    torch.testing.assert_close(advantages(name, scaled, **options), expected, rtol=1e-8, atol=1e-8)


@given(batches(), st.integers(1, 6), st.floats(-1e4, 1e4))
def test_statistics_merge_to_those_of_the_whole(rows, cut, offset):
    x, whole = rows.values + offset, Stats(0, 0.0, 0.0)
    for part in (slice(0, cut), slice(cut, cut), slice(cut, None)):
        whole = whole.merge(whiten_stats(x[part], rows.mask[part]))
    once = whiten_stats(x, rows.mask)
    assert whole.n == once.n
    assert whole.mean == pytest.approx(once.mean, rel=1e-12, abs=1e-12)
    assert whole.m2 == pytest.approx(once.m2, rel=1e-6, abs=1e-9)


@given(batches(), st.floats(-1e4, 1e4))
def test_whitened_has_mean_0_and_variance_1(rows, offset):
    ours = whiten(rows.values + offset, rows.mask)[rows.mask]
    if ours.numel() < 2 or not ours.any():
        return
    assert ours.mean().abs() < 1e-6
    assert ours.var() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1e6])
def test_whitening_of_equal_values_is_exactly_zero(value):
    mask = torch.tensor([True] * 7 + [False])
    assert not whiten(torch.full((8,), value), mask).any()
    assert not whiten(torch.full((8,), value), mask & False).any()
    assert not whiten(torch.full((8,), value), torch.arange(8) == 2).any()


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_where_nothing_was_sampled(name, dtype):
    mask, cu = torch.zeros(6, dtype=torch.bool), torch.tensor([0, 2, 6])
    given_T = torch.full((6,), float("nan"), dtype=dtype)
    more = {"values_T": given_T, "step_ends_T": ~mask, "baseline_N": torch.zeros(2)}
    ours = ADVANTAGES[name](given_T, mask, cu, torch.tensor([0, 0]), **more)
    assert ours.dtype == dtype and not ours.any()


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_empty_batch_has_loss_zero_with_a_graph(name):
    loss_T = torch.full((6,), float("nan"), requires_grad=True)
    loss = AGGREGATIONS[name](
        loss_T, torch.zeros(6), torch.tensor([0, 2, 6]), torch.tensor([0, 1]), constant=4
    )
    loss.backward()
    assert loss == 0 and not loss_T.grad.any()


@given(batches())
def test_value_loss_has_no_gradient_where_the_clip_acts(rows):
    values = rows.values.clone().requires_grad_()
    old, targets = (
        rows.values - 1.0,
        rows.values - 2.0,
    )  # clipped to old + 0.2, which is nearer to the target
    loss_T = clipped_value_loss(values, old, targets, rows.mask, clip=0.2)
    loss_T.sum().backward()
    torch.testing.assert_close(loss_T[rows.mask], torch.full_like(loss_T[rows.mask], 2.0))
    assert bool(values.grad[rows.mask].ne(0).all()) and not values.grad[~rows.mask].any()
    values.grad = None
    clipped_value_loss(values, old, rows.values + 2.0, rows.mask, clip=0.2).sum().backward()
    assert not values.grad.any()


@pytest.mark.parametrize("name", KL)
@given(batches())
def test_kl_of_a_policy_with_itself_is_zero(name, rows):
    assert not KL[name](rows.old, rows.old).any()
    if name in ("k2", "k3", "k3+", "abs"):
        assert bool((KL[name](rows.new, rows.old) >= -1e-15).all())
