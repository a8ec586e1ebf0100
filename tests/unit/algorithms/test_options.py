"""The objective's options: what happens to rewards, to the KL term, and to old log-probs, before and in the loss."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from reduced import CORRECTIONS, LOSSES, SELECT
from sample_rows import sample
from test_objective import algorithm, last_trained, losses_of, make_batch, make_logprobs, scored_by

from megarl.algorithms.kl import KL
from megarl.algorithms.objective import Objective
from megarl.config.schema import Algorithm
from megarl.data.collate import collate
from megarl.types import (
    Group,
    MicrobatchPlan,
    ObjectiveState,
    Prompt,
    ScoredBatch,
    StepReport,
    TokenLosses,
    TokenScores,
    TrainBatch,
    UpdateReport,
)


def with_rewards(batch: TrainBatch, values: list[float]) -> TrainBatch:
    rewards = torch.tensor(values)
    token_rewards = batch.token_rewards.index_put((batch.outcome_at,), rewards)
    return replace(batch, rewards=rewards, token_rewards=token_rewards)


def advantages_of(
    batch: TrainBatch,
    rules: Algorithm,
    state: ObjectiveState | None = None,
    logprobs: TokenScores | None = None,
) -> tuple[ScoredBatch, ObjectiveState]:
    objective = Objective(rules)
    return objective.advantages(
        batch, logprobs or make_logprobs(batch), state or objective.initial_state()
    )


def means_of(done: TokenLosses, batch: ScoredBatch, rules: Algorithm) -> dict[str, float]:
    return Objective(rules).metrics(
        batch, {name: float(x) / float(done.count) for name, x in done.sums.items()}
    )


def outcomes(
    batch: TrainBatch, state: ObjectiveState | None = None, **values
) -> tuple[torch.Tensor, ObjectiveState]:
    """What `reinforce` gives each row's last token: its outcome reward, after all that was done to it."""
    rules = algorithm(advantage="reinforce", **values)
    scored, state = advantages_of(batch, rules, state)
    return scored.advantages[last_trained(batch)], state


# --- rewards ------------------------------------------------------------------------------------------------------


def test_a_huge_reward_is_clipped_to_the_bound():
    """fp32 cannot add 1e30 and take it away again."""
    batch = with_rewards(make_batch(num_prompts=1), [1e30, -1e30, 0.5, 3.0])
    assert outcomes(batch, reward_clip=(-5, 2))[0].tolist() == [2, -5, 0.5, 2]


def test_rewards_are_normalised_by_all_seen_so_far_and_clipped_at_the_stage_asked_for():
    batch = make_batch(num_prompts=1)
    first, second = [0.0, 1.0, 2.0, 5.0], [3.0, 3.0, 4.0, 9.0]
    _, state = outcomes(with_rewards(batch, first), normalise_rewards=True)
    assert state.reward_stats == pytest.approx((4, 2.0, 14.0))
    seen = torch.tensor(first + second)
    expected = (torch.tensor(second) - seen.mean()) / seen.std()
    for stage, bounds in (("raw", None), ("normalised", (-0.1, 0.5))):
        more = {"reward_clip": bounds, "reward_clip_stage": stage}
        got, after = outcomes(with_rewards(batch, second), state, normalise_rewards=True, **more)
        torch.testing.assert_close(got, expected if bounds is None else expected.clamp(*bounds))
        assert after.reward_stats == pytest.approx((8, float(seen.mean()), float(seen.var() * 7)))
    got, after = outcomes(
        with_rewards(batch, second), state, normalise_rewards=True, reward_clip=(-1, 4)
    )
    assert after.reward_stats[1] == pytest.approx((8.0 + 3 + 3 + 4 + 4) / 8), "clipped first"
    _, after = outcomes(with_rewards(batch, [0.0, math.inf, 2.0, math.nan]), normalise_rewards=True)
    assert after.reward_stats == pytest.approx((2, 1.0, 2.0)), "of finite rewards"
    same, _ = outcomes(with_rewards(batch, [2.0] * 4), normalise_rewards=True)
    assert same.tolist() == [0, 0, 0, 0]


def test_the_greedy_baseline_is_normalised_as_the_rewards_are():
    batch = replace(make_batch(num_prompts=1), baseline=torch.full((4,), 1.0))
    batch = with_rewards(batch, [0.0, 1.0, 2.0, 5.0])
    rules = algorithm(advantage="remax", normalise_rewards=True)
    scored, _ = advantages_of(batch, rules)
    expected = (batch.rewards - 1.0) / batch.rewards.std()
    torch.testing.assert_close(scored.advantages[last_trained(batch)], expected)


def test_the_greedy_baseline_is_clipped_as_the_rewards_are():
    batch = replace(make_batch(num_prompts=1), baseline=torch.full((4,), 3.0))
    batch = with_rewards(batch, [0.0, 1.0, 2.0, 5.0])
    scored, _ = advantages_of(batch, algorithm(advantage="remax", reward_clip=(0.0, 2.0)))
    torch.testing.assert_close(
        scored.advantages[last_trained(batch)], torch.tensor([0.0, 1.0, 2.0, 2.0]) - 2.0
    )


def test_only_outcomes_are_touched():
    """A row whose reward only sums up its steps keeps them."""
    batch = with_rewards(make_batch(num_prompts=1), [1.0, 2.0, 3.0, 4.0])
    outcome_at = batch.outcome_at.clone()
    outcome_at[0] = -1
    got, state = outcomes(
        replace(batch, outcome_at=outcome_at), reward_clip=(0, 1), normalise_rewards=True
    )
    assert state.reward_stats[0] == 3 and got.tolist() == [1, 0, 0, 0]


def test_a_step_that_ends_with_the_outcome_keeps_its_reward():
    """Only the outcome, 9, is clipped to 1; the steps, of 2 and 3, are not."""
    row = sample("..xxx", reward=9.0, step_rewards=((2, 2.0), (4, 3.0)))
    batch = collate([Group(Prompt(0, (), ""), (row,))], temperature=1.0)
    for clip, last in ((None, 12.0), ((0.0, 1.0), 4.0)):
        rules = algorithm(advantage="reinforce", reward_clip=clip)
        scores = TokenScores(torch.zeros(batch.num_tokens), None)
        scored, _ = advantages_of(batch, rules, logprobs=scores)
        assert scored.advantages.tolist() == [0, 2 + last, last, last, 0]


# --- old log-probs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [float("nan"), float("-inf")])
def test_bypass_takes_the_engines_log_probs_and_does_not_correct_again(missing):
    batch = make_batch()
    spoilt = batch.rollout_logprobs.clone()
    spoilt[last_trained(batch)[0]] = missing  # the trainer's own stand in
    batch, logprobs = replace(batch, rollout_logprobs=spoilt), make_logprobs(batch)
    rules = algorithm(use_rollout_logprobs=True, clip_low=1e9, clip_high=1e9, dual_clip=None)
    scored, _ = advantages_of(batch, rules, logprobs=logprobs)
    taken = torch.where(
        batch.rollout_logprobs.isfinite(), batch.rollout_logprobs, logprobs.old_logprobs
    )
    assert torch.equal(scored.old_logprobs, logprobs.old_logprobs), (
        "the trainer's own, for the parity gate"
    )
    done = losses_of(logprobs.old_logprobs, scored, rules)
    at = (logprobs.old_logprobs, taken, scored.advantages, batch.mask, batch.cu_seqlens)
    expected = LOSSES["ppo_clip"](*at, clip_low=1e9, clip_high=1e9, dual_clip=None)
    torch.testing.assert_close(done.loss, expected, rtol=0, atol=0)
    tis = algorithm(
        correction="tis",
        correction_options={"cap": 1e9},
        clip_low=1e9,
        clip_high=1e9,
        dual_clip=None,
    )
    corrected, _ = advantages_of(batch, tis, logprobs=logprobs)
    torch.testing.assert_close(done.loss, losses_of(logprobs.old_logprobs, corrected, tis).loss)
    assert means_of(done, scored, rules)["correction/ess"] == 1


def test_correction_figures():
    batch = make_batch()
    rules = algorithm(correction="tis", correction_options={"cap": 1.1, "floor": 0.9})
    scored = scored_by(batch, rules)
    means = means_of(losses_of(scored.old_logprobs, scored, rules), scored, rules)
    plain = (scored.old_logprobs - scored.rollout_logprobs)[batch.mask].double().exp()
    assert means["correction/ess"] == pytest.approx(
        float(plain.sum() ** 2 / plain.square().sum() / plain.numel())
    )
    assert means["correction/clipped"] == pytest.approx(
        float(((plain < 0.9) | (plain > 1.1)).double().mean())
    )
    assert 0.2 < means["correction/clipped"] < 1 and means["correction/ess"] < 1
    assert means["correction/weight"] == pytest.approx(float(plain.clamp(0.9, 1.1).mean()))
    assert not any(name.startswith("importance_weight") for name in means)


def test_rows_of_a_truncated_product_count_as_clipped():
    batch = make_batch()
    rules = algorithm(correction="seq_tis", correction_options={"cap": 1.0})
    scored = scored_by(batch, rules)
    gap = torch.where(batch.mask, scored.old_logprobs - scored.rollout_logprobs, 0.0)
    rows = torch.arange(batch.num_rows).repeat_interleave(batch.cu_seqlens.diff())
    products = torch.zeros(batch.num_rows).index_add(0, rows, gap)
    clipped = (products > 0)[rows] & batch.mask
    done = losses_of(scored.old_logprobs, scored, rules)
    assert done.sums["correction/clipped"] == clipped.sum() and 0 < clipped.sum() < batch.mask.sum()


def test_the_teachers_log_ratio_is_part_of_each_advantage():
    """At most 20 nats, where it is certain that a token is wrong."""
    batch = make_batch()
    rules = algorithm(advantage="reinforce", loss="reinforce", distill_coef=0.5)
    gap = torch.where(torch.arange(batch.num_tokens) % 2 == 0, 0.3, 35.0)
    scored = scored_by(batch, rules)
    scored = replace(scored, teacher_logprobs=scored.old_logprobs - gap)
    new = scored.old_logprobs.clone().requires_grad_()
    done = losses_of(new, scored, rules)
    done.loss.sum().backward()
    expected = -(scored.advantages - 0.5 * gap.clamp(max=20.0))
    torch.testing.assert_close(new.grad, torch.where(batch.mask, expected, 0.0))


def test_dropped_rows_count_as_clipped():
    batch = make_batch()
    rules = algorithm(correction="opsm", correction_options={"delta": 0.1})
    scored = scored_by(batch, rules)
    new = scored.old_logprobs - 0.2 * (scored.advantages < 0)
    done = losses_of(new, scored, rules)
    at = (scored.old_logprobs, scored.rollout_logprobs, batch.mask, batch.cu_seqlens)
    weights = CORRECTIONS["opsm"](*at, logprobs_T=new, advantages_T=scored.advantages, delta=0.1)
    dropped = int((weights[batch.mask] == 0).sum())
    assert done.sums["correction/clipped"] == dropped > 0 and not done.loss[weights == 0].any()


# --- KL -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["reward", "loss"])
def test_the_coefficient_follows_its_target_from_the_next_batch_on(where):
    batch = make_batch()
    kl = {"where": where, "coef": 0.1, "target": 1e-4, "horizon": 32}
    rules = algorithm(advantage="reinforce", kl=kl)
    scored, state = advantages_of(batch, rules)
    assert scored.kl_coef == 0.1 and state.kl_coef == pytest.approx(
        0.1 * (1 + 0.2 * batch.num_rows / 32)
    )
    again, _ = advantages_of(batch, rules, state)
    losses = [losses_of(s.old_logprobs, s, rules).loss for s in (scored, again)]
    assert again.kl_coef == state.kl_coef
    assert torch.equal(scored.advantages, again.advantages) == (where == "loss")
    assert torch.equal(*losses) == (
        where == "reward" and bool((scored.advantages == again.advantages).all())
    )
    fixed = algorithm(advantage="reinforce", kl={**kl, "target": None})
    assert advantages_of(batch, fixed)[1].kl_coef == 0.1


@pytest.mark.parametrize(("short", "long", "rises"), [(0.5, 0.01, True), (0.01, 0.5, False)])
def test_the_coefficient_follows_the_mean_over_rows(short, long, rises):
    """Not the mean over tokens, which the long row decides: the target lies between the two."""
    rows = (sample("..x", reward=1.0), sample("..xxxxxxxxx", reward=0.0, index=1))
    batch = collate([Group(Prompt(0, (), ""), rows)], temperature=1.0)
    gap = torch.tensor([short, long]).repeat_interleave(batch.cu_seqlens.diff())
    old = torch.where(batch.mask, -1.0, 0.0)
    kl = KL["k3"](old, old - gap)
    per_row = [
        float(kl[mask].mean()) for mask in (batch.mask & (gap == short), batch.mask & (gap == long))
    ]
    target = (sum(per_row) / 2 + float(kl[batch.mask].mean())) / 2
    rules = algorithm(advantage="reinforce", kl={"coef": 0.1, "target": target, "horizon": 8})
    _, state = advantages_of(batch, rules, logprobs=TokenScores(old, old - gap))
    assert (state.kl_coef > 0.1) == rises


@pytest.mark.parametrize("against", ["reference", "old"])
def test_rows_without_a_trained_token_do_not_count_for_the_coefficient(against):
    """Neither in the mean, which they would dilute below the target, nor as samples of the horizon."""
    rows = [sample("..xxx", index=index) for index in range(4)]
    batch = collate([Group(Prompt(0, (), ""), tuple(rows))], temperature=1.0)
    masked = batch.mask & (torch.arange(batch.num_tokens) < int(batch.cu_seqlens[1]))
    batch = replace(
        batch, mask=masked, outcome_at=torch.tensor([int(batch.outcome_at[0]), -1, -1, -1])
    )
    old = torch.where(masked, -1.0, 0.0)
    kl = float(KL["k3"](old, old - 0.5).max())
    term = {"coef": 0.1, "target": kl / 1.1, "horizon": 8, "against": against, "estimator": "k2"}
    rules = algorithm(advantage="reinforce", kl=term)
    scored, state = advantages_of(batch, rules, logprobs=TokenScores(old, old - 0.5))
    if against == "old":
        assert state.kl_coef == 0.1
        update = UpdateReport(0.0, 0.0, 0.0, False, {"kl/old": kl})
        state = Objective(rules).after_updates(scored, StepReport((update,)), state)
    assert state.kl_coef == pytest.approx(0.1 * (1 + 0.1 * 1 / 8))


def test_a_batch_without_a_token_leaves_the_state():
    batch = make_batch()
    batch = replace(
        batch, mask=torch.zeros_like(batch.mask), outcome_at=torch.full_like(batch.outcome_at, -1)
    )
    rules = algorithm(kl={"coef": 0.1, "target": 1e-4}, normalise_rewards=True)
    scored, state = advantages_of(batch, rules)
    assert state == Objective(rules).initial_state() and not scored.advantages.any()


@pytest.mark.parametrize(
    ("estimator", "slope"),
    [("k1", "1 + delta"), ("k2", "delta"), ("k3", "delta"), ("k3+", "delta")],
)
def test_off_policy_kl_has_the_gradient_of_the_ratio_times_delta(estimator, slope):
    """The gradient of KL(pi || ref) under the old policy's samples; k1's 1 vanishes in the mean."""
    batch = make_batch()
    rules = algorithm(
        loss_options={}, kl={"estimator": estimator, "coef": 1.0, "importance_weighted": True}
    )
    scored = scored_by(batch, rules)
    flat = replace(scored, advantages=torch.zeros_like(scored.advantages))
    new = (scored.old_logprobs + 0.3).requires_grad_()
    losses_of(new, flat, rules).loss.sum().backward()
    delta = (new - scored.ref_logprobs).detach()
    expected = math.exp(0.3) * (delta + 1 if slope == "1 + delta" else delta)
    torch.testing.assert_close(
        new.grad, torch.where(batch.mask, expected, 0.0), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("estimator", KL)
def test_the_value_clamp_bounds_every_estimator(estimator):
    batch = make_batch()
    rules = algorithm(
        kl={
            "estimator": estimator,
            "coef": 1.0,
            "value_clamp": 0.01,
            "importance_weighted": estimator == "k1",
        }
    )
    scored = scored_by(batch, rules)
    flat = replace(scored, advantages=torch.zeros_like(scored.advantages))
    new = scored.old_logprobs.clone().requires_grad_()
    loss = losses_of(new, flat, rules).loss
    assert float(loss.detach().abs().max()) == pytest.approx(0.01)
    loss.sum().backward()
    if estimator == "k3+":
        torch.testing.assert_close(
            new.grad, torch.where(batch.mask, scored.old_logprobs - scored.ref_logprobs, 0.0)
        )


# --- selection ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", SELECT)
def test_tokens_are_selected_among_those_of_the_update(loss):
    batch = make_batch()
    options = {"share": 0.1} | ({"low": -100.0, "high": 100.0} if loss == "clip_cov" else {})
    rules = algorithm(loss=loss, token_selection_options=options, advantage="rloo")
    scored = scored_by(batch, rules)
    rows = range(8, 16)  # the second update
    plan = MicrobatchPlan((((tuple(rows),),),), 1.0)
    chosen = Objective(rules).select(scored, scored.old_logprobs, plan, seed=3)
    in_rows = torch.zeros(batch.num_rows, dtype=torch.bool)
    in_rows[list(rows)] = True
    in_update = batch.mask & in_rows.repeat_interleave(batch.cu_seqlens.diff())
    assert chosen.sum() == int(0.1 * in_update.sum()) > 0 and not chosen[~in_update].any()
    assert torch.equal(chosen, Objective(rules).select(scored, scored.old_logprobs, plan, seed=3))
    new = scored.old_logprobs + 0.1
    done = losses_of(new, scored, rules, select=chosen).loss
    at = (new, scored.old_logprobs, scored.advantages, batch.mask, batch.cu_seqlens)
    torch.testing.assert_close(done, LOSSES[loss](*at, select_T=chosen))
    assert not torch.equal(done, LOSSES[loss](*at)), "the selection acts"


def test_other_losses_select_nothing():
    assert not Objective(algorithm()).selects_tokens


# --- process rewards ----------------------------------------------------------------------------------------------


def test_steps_reach_the_advantages_with_the_outcome_as_one_more():
    rows = (
        sample("..xxxx", reward=0.0, step_rewards=((2, 1.0), (4, 0.0))),
        sample("..xxx", reward=1.0, index=1, step_rewards=((3, 0.5),)),
    )
    rules = algorithm(advantage="grpo_process")

    def advantages(samples) -> list[float]:
        batch = collate([Group(Prompt(0, (), ""), tuple(samples))], temperature=1.0)
        none = torch.zeros(batch.num_tokens)
        objective = Objective(rules)
        return objective.advantages(batch, TokenScores(none, None), objective.initial_state())[
            0
        ].advantages.tolist()

    pool = torch.tensor([1.0, 0.0, 0.0, 0.5, 1.0], dtype=torch.float64)
    a, b, c, d, e = ((pool - pool.mean()) / (pool.std() + 1e-6)).tolist()
    expected = [0, a + b + c, b + c, b + c, c, 0, 0, d + e, d + e, e, 0]
    assert advantages(rows) == pytest.approx(expected, abs=1e-6)
    alone = [replace(row, has_outcome=False) for row in rows]
    pool = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    a, b, d = ((pool - pool.mean()) / (pool.std() + 1e-6)).tolist()
    assert advantages(alone) == pytest.approx([0, a + b, b, b, 0, 0, 0, d, d, 0, 0], abs=1e-6)
