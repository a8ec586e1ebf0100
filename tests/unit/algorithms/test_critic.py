"""A critic's side of the objective: values to advantages and targets, the cut, the loss, what is reported."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from test_objective import algorithm, all_rows, last_trained, make_batch, make_logprobs
from torch import Tensor

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.critic import value_losses, value_metrics
from megarl.algorithms.objective import Objective
from megarl.algorithms.whitening import whiten
from megarl.config.presets import PRESETS
from megarl.types import FINISH, ScoredBatch, TokenOutputs, TrainBatch


def values_of(batch: TrainBatch, *, seed: int = 3) -> Tensor:
    """NaN where the head does not read; the last position of a row is one that CriticHead reads."""
    values_T = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed))
    is_read_T = batch.mask.index_fill(0, batch.cu_seqlens[1:] - 1, True)
    return torch.where(is_read_T, values_T, float("nan"))


def scored_by(
    batch: TrainBatch, objective: Objective, values_T: Tensor | None = None
) -> ScoredBatch:
    scores = replace(
        make_logprobs(batch), old_values=values_of(batch) if values_T is None else values_T
    )
    return objective.advantages(batch, scores, objective.initial_state())[0]


def gae(**options) -> Objective:
    critic = {
        key: options.pop(key) for key in ("value_lam", "bootstrap_truncated") if key in options
    }
    return Objective(
        algorithm(advantage="gae", advantage_options={"whiten": False, **options}), **critic
    )


def by_hand(
    batch: TrainBatch, values_T: Tensor, *, gamma: float, lam: float, after_N: Tensor
) -> Tensor:
    """GAE in fp64, a row after another, from its end; `after_N`: V after the last token."""
    result_T = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for row, (start, end) in enumerate(
        zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)
    ):
        following, advantage = float(after_N[row]), 0.0
        for t in reversed([t for t in range(start, end) if batch.mask[t]]):
            delta = float(batch.token_rewards[t]) + gamma * following - float(values_T[t])
            advantage = delta + gamma * lam * advantage
            following, result_T[t] = float(values_T[t]), advantage
    return result_T


@pytest.mark.parametrize(
    "kl", [{}, {"where": "reward", "coef": 0.1, "target": 0.1, "horizon": 100}]
)
@pytest.mark.parametrize("whitened", [False, True])
def test_with_lambda_1_and_values_of_0_it_is_reinforce_bit_for_bit(
    whitened: bool, kl: dict
) -> None:
    batch, states = make_batch(), []
    for name in ("gae", "reinforce"):
        objective = Objective(
            algorithm(advantage=name, advantage_options={"whiten": whitened}, kl=kl)
        )
        values_T = torch.zeros(batch.num_tokens) if name == "gae" else None
        scores = replace(make_logprobs(batch), old_values=values_T)
        states.append(objective.advantages(batch, scores, objective.initial_state()))
    (ours, state), (theirs, other) = states
    assert (
        torch.equal(ours.advantages, theirs.advantages) and ours.advantages.any() and state == other
    )
    assert theirs.returns is theirs.old_values is None and ours.returns is not None
    expected_T = whiten(ours.returns, batch.mask) if whitened else ours.returns
    torch.testing.assert_close(ours.advantages, expected_T)  # targets are those before whitening


@pytest.mark.parametrize("own_lam", [None, 1.0, 0.3])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (0.9, 0.0)])
def test_advantages_and_targets_are_those_of_a_loop(
    gamma: float, lam: float, own_lam: float | None
) -> None:
    batch = make_batch()
    values_T, nothing_N = values_of(batch), torch.zeros(batch.num_rows)
    scored = scored_by(batch, gae(gamma=gamma, lam=lam, value_lam=own_lam), values_T)
    advantages_T = by_hand(batch, values_T, gamma=gamma, lam=lam, after_N=nothing_N)
    target_lam = lam if own_lam is None else own_lam
    returns_T = (
        by_hand(batch, values_T, gamma=gamma, lam=target_lam, after_N=nothing_N)
        + values_T.nan_to_num()
    )
    torch.testing.assert_close(scored.advantages.double(), advantages_T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        scored.returns.double(), returns_T * batch.mask, rtol=1e-5, atol=1e-5
    )
    assert torch.equal(scored.old_values, torch.where(batch.mask, values_T, 0.0))
    whitened = scored_by(batch, gae(gamma=gamma, lam=lam, whiten=True, value_lam=own_lam), values_T)
    torch.testing.assert_close(
        whitened.advantages, whiten(scored.advantages, batch.mask), rtol=1e-4, atol=1e-5
    )
    assert torch.equal(whitened.returns, scored.returns)


def test_a_cut_response_goes_on_with_the_value_after_its_last_token() -> None:
    batch = make_batch()
    finish = torch.arange(batch.num_rows) % 3  # an aborted one does not: nobody knows why it ended
    assert FINISH == ("stop", "length", "abort")
    batch, values_T = replace(batch, finish=finish), values_of(batch)
    after_N = torch.where(finish == FINISH.index("length"), values_T[batch.cu_seqlens[1:] - 1], 0.0)
    assert (after_N != 0).sum() == 5
    for bootstrap in (False, True):
        scored = scored_by(batch, gae(gamma=0.9, lam=0.8, bootstrap_truncated=bootstrap), values_T)
        expected_T = by_hand(batch, values_T, gamma=0.9, lam=0.8, after_N=after_N * bootstrap)
        torch.testing.assert_close(scored.advantages.double(), expected_T, rtol=1e-5, atol=1e-5)
    masked = replace(batch, mask=torch.zeros_like(batch.mask))  # truncated: mask
    assert not scored_by(masked, gae(bootstrap_truncated=True), values_T).advantages.any()


def test_kl_in_the_reward_is_part_of_the_targets() -> None:
    """As far as any reward: the first token's target is the score minus the coefficient times the sum of KL."""
    batch, rules = make_batch(), algorithm(**PRESETS["ppo"])
    logprobs = make_logprobs(batch)
    scored = scored_by(batch, Objective(rules))
    gap_T = torch.where(batch.mask, logprobs.old_logprobs - logprobs.ref_logprobs, 0.0)
    spans = [*zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)]
    first_N = torch.stack([start + batch.mask[start:end].nonzero()[0, 0] for start, end in spans])
    kl_N = torch.stack([gap_T[start:end].sum() for start, end in spans])
    torch.testing.assert_close(
        scored.returns[first_N], batch.rewards - 0.01 * kl_N, rtol=1e-5, atol=1e-5
    )
    assert rules.entropy_coef == 0 and rules.needs_critic and rules.needs_reference
    assert scored.advantages[batch.mask].mean().abs() < 1e-6, "whitened"
    assert scored.advantages[last_trained(batch)].any()


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_loss_is_half_the_larger_squared_error(clip: float | None) -> None:
    batch = make_batch()
    scored = scored_by(batch, gae())
    step_T = 0.6 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(5))
    new = torch.where(batch.mask, scored.old_values + step_T, float("nan")).requires_grad_()
    losses, new_T = (
        value_losses(scored, clip, TokenOutputs(values_T=new), all_rows(batch)),
        new.detach(),
    )
    expected, clipped = torch.zeros(batch.num_tokens, dtype=torch.float64), 0
    for t in batch.mask.nonzero().flatten().tolist():
        old, value, target = (float(x[t]) for x in (scored.old_values, new_T, scored.returns))
        near = old + max(-clip, min(clip, value - old)) if clip is not None else value
        expected[t] = 0.5 * max((value - target) ** 2, (near - target) ** 2)
        clipped += clip is not None and abs(value - old) > clip
    torch.testing.assert_close(losses.loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert int(losses.sums["value/clip_frac"]) == clipped and (clipped > 0) == (clip is not None)
    losses.loss.sum().backward()
    assert new.grad.isfinite().all() and not new.grad[~batch.mask].any()


def test_explained_variance_is_1_for_an_exact_critic_and_0_for_a_constant() -> None:
    scored = scored_by(make_batch(), gae())
    mask_T = scored.mask
    for values_T, expected in (
        (scored.returns + 7, 1.0),
        (scored.returns * 0 + 3, 0.0),
        (-scored.returns, -3.0),
    ):
        found = value_metrics(replace(scored, old_values=values_T))
        assert found["value/explained_variance"] == pytest.approx(expected, abs=1e-5)
        assert found["value/mean"] == pytest.approx(
            float(values_T[mask_T].double().mean()), abs=1e-5
        )
        assert found["returns/mean"] == pytest.approx(
            float(scored.returns[mask_T].double().mean()), abs=1e-5
        )
    flat = value_metrics(replace(scored, returns=scored.returns * 0 + 1))
    assert "value/explained_variance" not in flat
    empty = replace(scored, mask=torch.zeros_like(mask_T))
    assert not any(map(math.isnan, value_metrics(empty).values()))


# --- bias and variance, on a Markov decision process that is enumerated ---------------------------------------------

STATES, ACTIONS, STEPS = 3, 2, 3


class Mdp:
    """Random transitions [s, a, s'], rewards [s, a] and policy [s, a]; an episode has STEPS steps."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        self.next_SAS, self.policy_SA = (
            draw(STATES, ACTIONS, STATES).softmax(-1),
            draw(STATES, ACTIONS).softmax(-1),
        )
        self.reward_SA, self.guess_tS = draw(STATES, ACTIONS), draw(STEPS + 1, STATES)
        self.guess_tS[STEPS] = 0

    def backed_up(self, value_S: Tensor, gamma: float) -> Tensor:
        """[s, a]: the reward and the discounted value of the next state, on average."""
        return self.reward_SA + gamma * self.next_SAS @ value_S

    def exact(self, gamma: float) -> tuple[Tensor, Tensor]:
        """V [t, s] and A [t, s, a], backwards in time."""
        value_tS, advantages = torch.zeros(STEPS + 1, STATES, dtype=torch.float64), []
        for t in reversed(range(STEPS)):
            q_SA = self.backed_up(value_tS[t + 1], gamma)
            value_tS[t] = (self.policy_SA * q_SA).sum(1)
            advantages.insert(0, q_SA - value_tS[t][:, None])
        return value_tS, torch.stack(advantages)

    def estimated(self, value_tS: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
        """Mean and variance [s, a] of the first step's advantage: `megarl`'s, of every trajectory, by its chance."""
        chance_N, first_N, rewards, values = [], [], [], []
        steps = [*product(range(ACTIONS), range(STATES))]
        for start in range(STATES):
            for path in product(steps, repeat=STEPS):
                state, chance = start, 1.0
                for t, (action, following) in enumerate(path):
                    chance *= float(self.next_SAS[state, action, following])
                    chance *= float(self.policy_SA[state, action]) if t else 1.0
                    rewards.append(float(self.reward_SA[state, action]))
                    values.append(float(value_tS[t, state]))
                    state = following
                chance_N.append(chance)
                first_N.append(start * ACTIONS + path[0][0])
        count, total = len(chance_N), len(rewards)
        at = (
            torch.ones(total, dtype=torch.bool),
            torch.arange(count + 1) * STEPS,
            torch.arange(count),
        )
        flat_T, values_T = (torch.tensor(x, dtype=torch.float64) for x in (rewards, values))
        found_T = ADVANTAGES["gae"](
            flat_T, *at, values_T=values_T, gamma=gamma, lam=lam, whiten=False
        )
        index_N, chance, found_N = (
            torch.tensor(first_N),
            torch.tensor(chance_N, dtype=torch.float64),
            found_T[::STEPS],
        )

        def mean_of(x_N: Tensor) -> Tensor:
            total_K = torch.zeros(STATES * ACTIONS, dtype=torch.float64).index_add(
                0, index_N, chance * x_N
            )
            return total_K.view(STATES, ACTIONS)

        assert mean_of(torch.ones(count, dtype=torch.float64)).allclose(
            torch.ones(STATES, ACTIONS).double()
        )
        return mean_of(found_N), mean_of(found_N.square()) - mean_of(found_N).square()


GAMMA = 0.9


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_the_bias_of_gae_is_that_of_the_formula(lam: float) -> None:
    """With e = guess - V: -e(s_t) + gamma (1 - lam) sum over l of (gamma lam)^l E[e(s_(t+l+1))]; 0 with V itself."""
    mdp = Mdp()
    exact_tS, advantage_tSA = mdp.exact(GAMMA)
    error_tS = mdp.guess_tS - exact_tS
    onward_SS = torch.einsum("sa,sat->st", mdp.policy_SA, mdp.next_SAS)
    chance_SAS, expected_SA = mdp.next_SAS, -error_tS[0][:, None].expand(STATES, ACTIONS).clone()
    for later in range(STEPS):
        expected_SA += GAMMA * (1 - lam) * (GAMMA * lam) ** later * chance_SAS @ error_tS[later + 1]
        chance_SAS = chance_SAS @ onward_SS
    mean_SA, _ = mdp.estimated(mdp.guess_tS, GAMMA, lam)
    torch.testing.assert_close(mean_SA - advantage_tSA[0], expected_SA, rtol=0, atol=1e-12)
    assert expected_SA.abs().max() > 0.1
    unbiased_SA, _ = mdp.estimated(exact_tS, GAMMA, lam)
    torch.testing.assert_close(unbiased_SA, advantage_tSA[0], rtol=0, atol=1e-12)


def test_the_variance_of_gae_is_that_of_its_recursion_and_grows_with_lambda() -> None:
    """E[A^2] = E[delta^2] + 2 gamma lam E[delta E[A']] + (gamma lam)^2 E[A'^2], backwards in time."""
    mdp, seen = Mdp(), []
    value_tS, _ = mdp.exact(GAMMA)
    for lam in (0.0, 0.5, 0.95, 1.0):
        mean_S = square_S = torch.zeros(STATES, dtype=torch.float64)
        for t in reversed(range(STEPS)):
            delta_SAS = (
                mdp.reward_SA[:, :, None] + GAMMA * value_tS[t + 1] - value_tS[t][:, None, None]
            )
            both_SAS = (
                delta_SAS.square()
                + 2 * GAMMA * lam * delta_SAS * mean_S
                + (GAMMA * lam) ** 2 * square_S
            )
            mean_SA = (mdp.next_SAS * (delta_SAS + GAMMA * lam * mean_S)).sum(-1)
            square_SA = (mdp.next_SAS * both_SAS).sum(-1)
            mean_S, square_S = (mdp.policy_SA * mean_SA).sum(1), (mdp.policy_SA * square_SA).sum(1)
        variance_SA = mdp.estimated(value_tS, GAMMA, lam)[1]
        torch.testing.assert_close(variance_SA, square_SA - mean_SA.square(), rtol=0, atol=1e-12)
        seen.append(float(variance_SA.mean()))
    assert seen == sorted(seen) and seen[-1] > 1.5 * seen[0]
