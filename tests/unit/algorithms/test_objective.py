"""The objective as configured: rewards to advantages once, log-probs to losses in every micro-batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reduced import AGGREGATIONS, LOSS_AND_CLIP, LOSSES
from torch import Tensor, nn

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.kl import KL
from megarl.algorithms.objective import Objective, loss_weights, supervised_loss
from megarl.config.estimators import BOUNDS
from megarl.config.presets import PRESETS
from megarl.config.schema import Algorithm, Train
from megarl.data.collate import collate
from megarl.data.packing import plan_microbatches
from megarl.layout import Layout, Parallel
from megarl.types import (
    Group,
    MicrobatchPlan,
    MicrobatchRows,
    Prompt,
    Sample,
    ScoredBatch,
    StepReport,
    TokenLosses,
    TokenOutputs,
    TokenScores,
    TrainBatch,
    UpdateReport,
)

VOCAB = 11


def make_batch(*, seed: int = 0, num_prompts: int = 4, samples: int = 4) -> TrainBatch:
    random = torch.Generator().manual_seed(seed)

    def sample(prompt: int, index: int) -> Sample:
        length = int(torch.randint(1, 9, (), generator=random))
        tokens = torch.randint(0, VOCAB, (2 + length,), generator=random)
        trainable = torch.arange(2 + length) >= 2
        logprobs = torch.where(trainable, -torch.rand(2 + length, generator=random), 0.0)
        reward = float(torch.randint(0, 4, (), generator=random))
        return Sample(
            prompt, index, tokens, trainable, logprobs, trainable.int(), "stop", reward=reward
        )

    groups = [
        Group(Prompt(prompt, (), ""), tuple(sample(prompt, index) for index in range(samples)))
        for prompt in range(num_prompts)
    ]
    return collate(groups, temperature=1.0)


def make_logprobs(batch: TrainBatch, *, seed: int = 1) -> TokenScores:
    random = torch.Generator().manual_seed(seed)
    old, ref = (
        torch.where(
            batch.mask,
            batch.rollout_logprobs + 0.2 * torch.randn(batch.num_tokens, generator=random),
            0.0,
        )
        for _ in range(2)
    )
    return TokenScores(old, ref)


def algorithm(**values) -> Algorithm:
    return Algorithm.model_validate(values)


def last_trained(batch: TrainBatch) -> Tensor:
    spans = zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
    return torch.stack([start + batch.mask[start:end].nonzero()[-1, 0] for start, end in spans])


def all_rows(batch: TrainBatch) -> MicrobatchRows:
    """The whole batch as one micro-batch."""
    return MicrobatchRows(
        tuple(range(batch.num_rows)), torch.arange(batch.num_tokens), batch.cu_seqlens, batch.mask
    )


def losses_of(
    new: Tensor,
    batch: ScoredBatch,
    rules: Algorithm,
    entropy: Tensor | None = None,
    select: Tensor | None = None,
) -> TokenLosses:
    return Objective(rules).loss(batch, select)(TokenOutputs(new, entropy), all_rows(batch))


def scored_by(batch: TrainBatch, rules: Algorithm) -> ScoredBatch:
    return Objective(rules).advantages(
        batch, make_logprobs(batch), Objective(rules).initial_state()
    )[0]


# --- advantages ---------------------------------------------------------------------------------------------------


def test_reinforce_pp_is_the_reward_minus_kl_to_come():
    batch = make_batch()
    rules = algorithm(
        advantage="reinforce_pp",
        advantage_options={"whiten": False},
        kl={"estimator": "k1", "where": "reward", "coef": 0.1},
    )
    logprobs, scored = make_logprobs(batch), scored_by(batch, rules)
    for row, (start, end) in enumerate(
        zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
    ):
        for t in range(int(start), int(end)):
            if not batch.mask[t]:
                assert scored.advantages[t] == 0
                continue
            later = [i for i in range(t, int(end)) if batch.mask[i]]
            expected = batch.rewards[row] - 0.1 * sum(
                logprobs.old_logprobs[i] - logprobs.ref_logprobs[i] for i in later
            )
            assert scored.advantages[t] == pytest.approx(float(expected), abs=1e-5)


def test_rewards_are_clipped_before_kl_is_subtracted():
    batch = make_batch()
    kl = {"estimator": "k1", "where": "reward", "coef": 0.1}
    rules = algorithm(advantage="reinforce", kl=kl, reward_clip=(0.5, 1.5))
    logprobs = make_logprobs(batch)
    rewards = torch.zeros(batch.num_tokens)
    rewards[last_trained(batch)] = batch.rewards.clamp(0.5, 1.5)
    rewards -= 0.1 * (logprobs.old_logprobs - logprobs.ref_logprobs)
    expected = ADVANTAGES["reinforce"](rewards, batch.mask, batch.cu_seqlens, batch.group)
    torch.testing.assert_close(scored_by(batch, rules).advantages, expected)
    assert float(batch.token_rewards.max()) == 3.0  # the batch itself is as it was


def test_the_states_coefficient_is_the_one_in_force():
    batch = make_batch()
    rules = algorithm(advantage="reinforce", kl={"estimator": "k1", "where": "reward", "coef": 0.1})
    state = replace(Objective(rules).initial_state(), kl_coef=0.0)
    scored, _ = Objective(rules).advantages(batch, make_logprobs(batch), state)
    torch.testing.assert_close(scored.advantages[last_trained(batch)], batch.rewards)


def test_kl_to_the_old_policy_needs_no_reference_and_adapts_after_the_updates():
    batch = make_batch()
    kl = {"against": "old", "estimator": "k2", "coef": 0.3, "target": 0.1, "horizon": 100}
    rules = algorithm(advantage="reinforce", kl=kl)
    objective = Objective(rules)
    assert not rules.needs_reference and not objective.reads_old_logprobs
    state = objective.initial_state()
    scored, _ = objective.advantages(batch, make_logprobs(batch), state)
    new = (scored.old_logprobs + 0.2).requires_grad_()
    without = replace(scored, kl_coef=0.0)
    penalty = losses_of(new, scored, rules).loss - losses_of(new, without, rules).loss
    torch.testing.assert_close(penalty, torch.where(batch.mask, 0.3 * 0.2**2 / 2, 0.0))
    penalty.sum().backward()
    torch.testing.assert_close(new.grad, torch.where(batch.mask, 0.3 * 0.2, 0.0))
    for measured, factor in (
        (1.0, 1 + 0.2 * 16 / 100),
        (0.1, 1.0),
        (0.0, 1 - 0.2 * 16 / 100),
        (float("nan"), 1.0),
    ):
        updates = tuple(
            UpdateReport(0.0, 0.0, 0.0, False, {"kl/old": value}) for value in (9.0, measured)
        )
        after = objective.after_updates(scored, StepReport(updates), state)
        assert after == replace(state, kl_coef=pytest.approx(0.3 * factor))
        reference = {"coef": 0.3, "target": 0.1}  # adapted before the updates
        for other in (algorithm(), algorithm(kl=reference)):
            assert Objective(other).after_updates(scored, StepReport(updates), state) == state


def test_nan_log_probs_outside_the_mask_change_nothing():
    batch = make_batch()
    rules = algorithm(**PRESETS["reinforce_pp"])
    logprobs = make_logprobs(batch)
    spoilt = TokenScores(
        *(
            torch.where(batch.mask, x, float("nan"))
            for x in (logprobs.old_logprobs, logprobs.ref_logprobs)
        )
    )
    scored, _ = Objective(rules).advantages(batch, spoilt, Objective(rules).initial_state())
    assert torch.equal(scored.advantages, scored_by(batch, rules).advantages)


# --- losses -------------------------------------------------------------------------------------------------------


def test_token_losses_add_up_to_the_formula():
    batch = make_batch()
    kl = {"estimator": "k3+", "where": "loss", "coef": 0.3}
    rules = algorithm(
        kl=kl, entropy_coef=0.05, correction="tis", correction_options={"cap": 1.05}, clip_low=0.1
    )
    scored = scored_by(batch, rules)
    new = torch.where(batch.mask, scored.old_logprobs + 0.3, float("nan")).requires_grad_()
    entropy = torch.rand(batch.num_tokens, requires_grad=True)
    done = losses_of(new, scored, rules, entropy)
    ratio, gap = torch.tensor(0.3).exp(), scored.old_logprobs - scored.rollout_logprobs
    policy = torch.maximum(-scored.advantages * ratio, -scored.advantages * ratio.clamp(0.9, 1.28))
    policy = policy * gap.exp().clamp(max=1.05)
    penalty = KL["k3"](scored.old_logprobs + 0.3, scored.ref_logprobs)
    expected = torch.where(batch.mask, policy + 0.3 * penalty - 0.05 * entropy, 0)
    torch.testing.assert_close(done.loss, expected)
    done.loss.sum().backward()
    assert new.grad.isfinite().all() and not new.grad[~batch.mask].any()
    torch.testing.assert_close(entropy.grad, -0.05 * batch.mask.float())
    slope = torch.where(scored.advantages > 0, 0.0, -scored.advantages * ratio) * gap.exp().clamp(
        max=1.05
    )
    slope = slope + 0.3 * (scored.old_logprobs + 0.3 - scored.ref_logprobs)
    torch.testing.assert_close(new.grad, torch.where(batch.mask, slope, 0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", [loss for loss in BOUNDS if BOUNDS[loss]])
def test_the_bounds_of_the_config_are_those_of_the_loss(loss):
    """Its own where none is given, and each that is given acts."""
    batch = make_batch()
    scored = scored_by(batch, algorithm())
    at = (scored.old_logprobs, scored.advantages, batch.mask, batch.cu_seqlens)
    far = scored.old_logprobs + torch.where(scored.advantages > 0, 3.0, -3.0)
    for new in (far, 2 * scored.old_logprobs - far):
        for given in ({}, *({name: 3.0 if name == "dual_clip" else 1e-4} for name in BOUNDS[loss])):
            done = losses_of(new, scored, algorithm(loss=loss, **given)).loss
            torch.testing.assert_close(done, LOSSES[loss](new, *at, **given), rtol=0, atol=0)
    for name in BOUNDS[loss]:
        bound = {name: 3.0 if name == "dual_clip" else 1e-4}
        assert any(
            not torch.equal(LOSSES[loss](new, *at, **bound), LOSSES[loss](new, *at))
            for new in (far, 2 * scored.old_logprobs - far)
        ), f"{name} is met"


@pytest.mark.parametrize("loss", ["gspo", "gmpo", "cispo", "ppo_clip", "clip_cov"])
def test_clip_frac_counts_the_tokens_a_bound_acts_on(loss):
    """Moving a bound out of the way changes exactly these tokens' losses, where a bound acts on a token alone."""
    batch = make_batch()
    scored = scored_by(batch, algorithm())
    step = 0.6 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(2))
    at = (
        scored.old_logprobs + step,
        scored.old_logprobs,
        scored.advantages,
        batch.mask,
        batch.cu_seqlens,
    )
    bounds = {"clip_low": 0.1, "clip_high": 0.3}
    far = {"clip_low": 1e9, "clip_high": 1e9}
    clipped = LOSS_AND_CLIP[loss](*at, **bounds)[1]
    if loss == "gmpo":  # one number a row: rows that are touched
        rows = [
            slice(a, b) for a, b in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
        ]
        clipped = (
            torch.cat([clipped[row].any().expand(row.stop - row.start) for row in rows])
            & batch.mask
        )
        clipped &= scored.advantages != 0
    changed = LOSSES[loss](*at, **bounds) != LOSSES[loss](*at, **far)
    nonzero = scored.advantages != 0
    assert torch.equal(clipped & nonzero, changed) and 0 < clipped.sum() < batch.mask.sum()
    rules = algorithm(
        loss=loss, **bounds, **({"dual_clip": None} if "dual_clip" in BOUNDS[loss] else {})
    )
    done = losses_of(at[0], scored, rules)
    assert done.sums["clip_frac"] == LOSS_AND_CLIP[loss](*at, **bounds)[1].sum()


def test_clip_frac_counts_the_tokens_beyond_the_dual_clip():
    """Ratios 1, 2, 4 and 4, of which the last has a positive advantage and is beyond the upper bound."""
    new = torch.tensor([1.0, 2.0, 4.0, 4.0]).log()
    advantages = torch.tensor([-1.0, -1.0, -1.0, 1.0])
    rows = (torch.ones(4, dtype=torch.bool), torch.tensor([0, 4]))
    clipped = LOSS_AND_CLIP["ppo_clip"](new, 0 * new, advantages, *rows, dual_clip=3.0)[1]
    assert clipped.tolist() == [False, False, True, True]


def test_sums_are_over_trained_tokens():
    batch = make_batch()
    rules = algorithm(kl={"estimator": "k2", "coef": 0.1}, clip_high=0.2)
    scored = scored_by(batch, rules)
    new = scored.old_logprobs + torch.where(scored.advantages > 0, 0.3, 0.1)
    done = losses_of(new, scored, rules, torch.ones(batch.num_tokens))
    assert done.sums["clip_frac"] == int((scored.advantages > 0).sum())
    assert done.sums["entropy"] == int(batch.mask.sum())
    gap = (scored.old_logprobs - new)[batch.mask]
    torch.testing.assert_close(done.sums["kl/old"].float(), ((-gap).exp() - 1 + gap).sum())
    delta = (new - scored.ref_logprobs)[batch.mask]
    torch.testing.assert_close(done.sums["kl/ref"].float(), ((-delta).exp() - 1 + delta).sum())


def test_on_policy_the_value_is_zero_and_the_gradient_is_reinforces():
    batch = make_batch()
    scored = scored_by(batch, algorithm())
    at = (scored.old_logprobs, scored.advantages, batch.mask, batch.cu_seqlens)
    gradients = []
    for name in ("ppo_clip", "reinforce"):
        new = scored.old_logprobs.clone().requires_grad_()
        loss = AGGREGATIONS["seq-mean-token-mean"](
            LOSSES[name](new, *at), batch.mask, batch.cu_seqlens
        )
        loss.backward()
        gradients.append(new.grad)
        if name == "ppo_clip":
            assert loss.abs() < 1e-6
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().sum() > 0.1


def test_supervised_loss_is_cross_entropy():
    batch = make_batch()
    old = make_logprobs(batch).old_logprobs
    new = torch.where(batch.mask, old, float("nan")).requires_grad_()
    done = supervised_loss(TokenOutputs(new, torch.ones(batch.num_tokens)), all_rows(batch))
    done.loss.sum().backward()
    torch.testing.assert_close(done.loss, -torch.where(batch.mask, old, 0))
    torch.testing.assert_close(new.grad, -batch.mask.float())
    assert done.count == done.sums["entropy"] == batch.mask.sum()


def test_without_old_log_probs_those_of_the_update_stand_in():
    """Value and gradient are those of a batch that was scored under the same weights."""
    batch = make_batch()
    for values in ({}, {"use_rollout_logprobs": True}, {"correction": "tis"}):
        rules, results = algorithm(**values), []
        scored = scored_by(batch, rules)
        for old in (scored.old_logprobs, None):
            new = scored.old_logprobs.clone().requires_grad_()
            done = losses_of(new, replace(scored, old_logprobs=old), rules)
            done.loss.sum().backward()
            results.append([done.loss.detach(), new.grad, *done.sums.values()])
        assert all(map(torch.equal, *results)) and results[0][1].any()


# --- through a model ----------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """Two layers over tokens of their own row only; rows are computed one by one, so packing cannot mix them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(VOCAB, 8).double(), nn.Linear(8, VOCAB).double()

    def logprobs(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(tokens).cumsum(0).tanh()
        return self.out(hidden).log_softmax(-1).gather(1, labels[:, None])[:, 0]


def gradient(
    scored: ScoredBatch, rules: Algorithm, plan: MicrobatchPlan, aggregation: str
) -> Tensor:
    """Summed over the updates, ranks and micro-batches of a plan, as the trainer sums it."""
    model = Tiny()
    weights = loss_weights(scored, plan, aggregation, group=scored.group, constant=8)
    spans = [
        slice(a, b) for a, b in zip(scored.cu_seqlens[:-1], scored.cu_seqlens[1:], strict=True)
    ]
    for rows in (rows for update in plan.rows for rank in update for rows in rank if rows):
        index = torch.cat([torch.arange(spans[row].start, spans[row].stop) for row in rows])
        lengths = torch.tensor([0, *(spans[row].stop - spans[row].start for row in rows)])
        new = torch.cat(
            [model.logprobs(scored.tokens[spans[row]], scored.labels[spans[row]]) for row in rows]
        )
        part = MicrobatchRows(rows, index, lengths.cumsum(0), scored.mask[index])
        loss = Objective(rules).loss(scored)(TokenOutputs(new), part).loss
        (loss * weights[index]).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "gmpo", "cispo"])
def test_the_gradient_does_not_depend_on_ranks_or_micro_batches(aggregation, loss):
    batch = make_batch(seed=3)
    rules = algorithm(
        loss=loss, aggregation=aggregation, kl={"coef": 0.1}, correction="tis", clip_low=0.3
    )
    scored = scored_by(batch, rules)
    whole = MicrobatchPlan((((tuple(range(batch.num_rows)),),),), 1.0)
    expected = gradient(scored, rules, whole, aggregation)
    assert expected.abs().max() > 1e-4
    for dp in (1, 2, 4):
        for max_tokens in (12, 40):
            layout = Layout.of(Parallel(), dp, 0)
            plan = plan_microbatches(scored, layout, Train(max_tokens_per_microbatch=max_tokens))
            torch.testing.assert_close(
                gradient(scored, rules, plan, aggregation), expected, rtol=1e-10, atol=1e-12
            )


def test_each_update_has_its_own_denominator():
    scored = scored_by(make_batch(), algorithm())
    plan = plan_microbatches(scored, Layout.of(Parallel(), 1, 0), Train(updates_per_step=2))
    weights = loss_weights(scored, plan)
    assert weights.sum() == pytest.approx(2.0)  # 1 for each update
    assert weights[scored.mask].unique().numel() == 2 and not weights[~scored.mask].any()


def test_presets_are_valid_values():
    for values in PRESETS.values():
        rules, batch = algorithm(**values), make_batch()
        values_T = torch.zeros(batch.num_tokens) if rules.needs_critic else None
        scores = replace(make_logprobs(batch), old_values=values_T)
        Objective(rules).advantages(batch, scores, Objective(rules).initial_state())
