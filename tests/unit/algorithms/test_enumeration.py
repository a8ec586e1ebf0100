"""Proofs by enumeration: every sequence of a toy policy is listed, so expectations are sums without noise."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from reduced import AGGREGATIONS, LOSSES
from torch import Tensor

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.kl import KL

VOCAB, END, LONGEST = 3, 2, 3


def sequences() -> list[tuple[int, ...]]:
    """All that end with END or at the longest length."""
    found = []
    for length in range(1, LONGEST + 1):
        for tokens in product(range(VOCAB), repeat=length):
            if END not in tokens[:-1] and (tokens[-1] == END or length == LONGEST):
                found.append(tokens)
    return found


SEQUENCES = sequences()
REWARDS = torch.tensor(
    [float(3 * s.count(1) - len(s) ** 2 + 2 * s.count(0)) for s in SEQUENCES], dtype=torch.float64
)
PREFIXES = sorted({s[:t] for s in SEQUENCES for t in range(len(s))})


def make_logits(seed: int) -> Tensor:
    """One row of logits for each prefix: the policy may be anything."""
    return torch.randn(
        len(PREFIXES), VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def token_logprobs(logits: Tensor, sequence: tuple[int, ...]) -> Tensor:
    table = logits.log_softmax(-1)
    return torch.stack(
        [table[PREFIXES.index(sequence[:t]), token] for t, token in enumerate(sequence)]
    )


def probabilities(logits: Tensor) -> Tensor:
    return torch.stack([token_logprobs(logits, sequence).sum() for sequence in SEQUENCES]).exp()


def exact_gradient() -> tuple[Tensor, Tensor]:
    """(logits, gradient of -E[reward])."""
    logits = make_logits(0).requires_grad_()
    (-(probabilities(logits) * REWARDS).sum()).backward()
    return logits.detach(), logits.grad


def flat(chosen: list[int], logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logprobs_T, rewards_T, mask_T, cu) of the listed sequences end to end."""
    parts = [token_logprobs(logits, SEQUENCES[index]) for index in chosen]
    lengths = torch.tensor([0, *(part.numel() for part in parts)])
    rewards_T = torch.zeros(int(lengths.sum()), dtype=torch.float64)
    rewards_T[lengths.cumsum(0)[1:] - 1] = REWARDS[chosen]
    return (
        torch.cat(parts),
        rewards_T,
        torch.ones(rewards_T.numel(), dtype=torch.bool),
        lengths.cumsum(0),
    )


def expected_gradient(name: str, num_samples: int, **options) -> Tensor:
    """E over all tuples of `num_samples` sequences of one prompt of the gradient of the mean loss of the tuple."""
    logits, _ = exact_gradient()
    chances = probabilities(logits)
    total = torch.zeros_like(logits)
    for chosen in product(range(len(SEQUENCES)), repeat=num_samples):
        at = logits.clone().requires_grad_()
        logprobs_T, rewards_T, mask_T, cu = flat(list(chosen), at)
        group_N = torch.zeros(num_samples, dtype=torch.int64)
        advantages_T = ADVANTAGES[name](rewards_T, mask_T, cu, group_N, **options)
        loss_T = LOSSES["ppo_clip"](logprobs_T, logprobs_T.detach(), advantages_T, mask_T, cu)
        AGGREGATIONS["seq-mean-token-sum"](loss_T, mask_T, cu).backward()
        total += chances[list(chosen)].prod() * at.grad
    return total


def test_the_probabilities_sum_to_one():
    assert probabilities(make_logits(0)).sum() == pytest.approx(1.0, abs=1e-14)


def test_reinforce_is_the_policy_gradient():
    torch.testing.assert_close(
        expected_gradient("reinforce", 1), exact_gradient()[1], rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("baseline", [1.0, -7.5])
def test_a_baseline_changes_nothing_in_expectation(baseline):
    logits, exact = exact_gradient()
    total = torch.zeros_like(logits)
    for index, chance in enumerate(probabilities(logits)):
        at = logits.clone().requires_grad_()
        logprobs_T, rewards_T, mask_T, cu = flat([index], at)
        greedy = torch.tensor([baseline], dtype=torch.float64)
        advantages_T = ADVANTAGES["remax"](
            rewards_T, mask_T, cu, torch.tensor([0]), baseline_N=greedy
        )
        LOSSES["reinforce"](logprobs_T, logprobs_T, advantages_T, mask_T, cu).sum().backward()
        total += chance * at.grad
    torch.testing.assert_close(total, exact, rtol=0, atol=1e-10)


def test_rloo_is_unbiased():
    torch.testing.assert_close(
        expected_gradient("rloo", 2), exact_gradient()[1], rtol=0, atol=1e-10
    )


def test_the_group_mean_shrinks_the_gradient_by_k_minus_1_over_k():
    torch.testing.assert_close(
        expected_gradient("dr_grpo", 2), exact_gradient()[1] / 2, rtol=0, atol=1e-10
    )


# --- KL over one distribution ---------------------------------------------------------------------------------------


def expected_kl(name: str) -> tuple[Tensor, Tensor]:
    """E under the policy of the estimator, and of its gradient to the logits."""
    at = make_logits(1)[0].requires_grad_()
    logprobs = at.log_softmax(-1)
    values = KL[name](logprobs, make_logits(2)[0].log_softmax(-1))
    (logprobs.detach().exp() * values).sum().backward()
    return (logprobs.exp() * values).sum().detach(), at.grad


def exact_kl(direction: str) -> tuple[Tensor, Tensor]:
    at = make_logits(1)[0].requires_grad_()
    policy, reference = at.log_softmax(-1), make_logits(2)[0].log_softmax(-1)
    first, second = (policy, reference) if direction == "policy || ref" else (reference, policy)
    kl = (first.exp() * (first - second)).sum()
    kl.backward()
    return kl.detach(), at.grad


@pytest.mark.parametrize("name", ["k1", "k3", "k3+"])
def test_the_expected_value_is_the_kl(name):
    torch.testing.assert_close(
        expected_kl(name)[0], exact_kl("policy || ref")[0], rtol=0, atol=1e-10
    )


@pytest.mark.parametrize(
    ("name", "direction"),
    [("k2", "policy || ref"), ("k3+", "policy || ref"), ("k3", "ref || policy")],
)
def test_the_expected_gradient_is_that_of_the_kl(name, direction):
    torch.testing.assert_close(expected_kl(name)[1], exact_kl(direction)[1], rtol=0, atol=1e-10)


def test_k1_has_no_expected_gradient():
    torch.testing.assert_close(
        expected_kl("k1")[1], torch.zeros(VOCAB, dtype=torch.float64), rtol=0, atol=1e-10
    )
