"""The divergence over a teacher's likeliest tokens and one outcome for all others, against whole softmaxes in fp64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megarl.algorithms.kl import teacher_divergence

T, VOCAB = 6, 12


def draw() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (2 * torch.randn(T, VOCAB, generator=generator).double() for _ in range(2))
    return logits.requires_grad_(), teacher.log_softmax(1)


def top(logits: Tensor, teacher: Tensor, k: int) -> tuple[Tensor, Tensor]:
    ids = teacher.topk(k, 1).indices
    return logits.log_softmax(1).gather(1, ids), teacher.gather(1, ids)


def plain(logits: Tensor, teacher: Tensor, k: int, beta: float) -> Tensor:
    """Written with the probabilities of k tokens and the sum of the others', if there are any."""
    by_rank = teacher.argsort(1, descending=True)
    p, q = (x.gather(1, by_rank) for x in (logits.softmax(1), teacher.exp()))
    if k < VOCAB:
        p, q = (torch.cat([x[:, :k], x[:, k:].sum(1, keepdim=True)], 1) for x in (p, q))

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(1)

    mix = beta * q + (1 - beta) * p
    return (
        kl(p, q)
        if beta == 1
        else kl(q, p)
        if beta == 0
        else beta * kl(q, mix) + (1 - beta) * kl(p, mix)
    )


@pytest.mark.parametrize("beta", [1.0, 0.0, 0.3])
@pytest.mark.parametrize("k", [1, 4, VOCAB - 1, VOCAB])
def test_value_and_gradient_are_those_of_plain_softmaxes(k: int, beta: float) -> None:
    logits, teacher = draw()
    found = teacher_divergence(*top(logits, teacher, k), torch.ones(T).bool(), beta=beta)
    exact = plain(logits, teacher, k, beta)
    assert torch.allclose(found, exact, rtol=1e-10, atol=1e-12)
    gradients = [
        torch.autograd.grad((x * torch.arange(1, T + 1)).sum(), logits)[0] for x in (found, exact)
    ]
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-11)
    assert gradients[0].abs().max() > 0.01


@pytest.mark.parametrize("beta", [1.0, 0.0, 0.3])
def test_a_lower_bound_that_grows_with_k(beta: float) -> None:
    logits, teacher = draw()
    found = [
        teacher_divergence(*top(logits, teacher, k), torch.ones(T).bool(), beta=beta)
        for k in range(1, VOCAB + 1)
    ]
    assert all((less <= more + 1e-12).all() for less, more in pairwise(found))
    assert (found[0] >= 0).all() and (found[3] < 0.999 * found[-1]).any()


@pytest.mark.parametrize("beta", [1.0, 0.0, 0.3])
def test_order_padding_and_masked_positions_do_not_matter(beta: float) -> None:
    logits, teacher = draw()
    student_TK, teacher_TK = (x.float().detach().requires_grad_() for x in top(logits, teacher, 4))
    mask = torch.arange(T) != 2
    plain = teacher_divergence(student_TK, teacher_TK, mask, beta=beta)
    (gradient,) = torch.autograd.grad(plain.sum(), student_TK)
    assert plain[2] == 0 and (gradient[2] == 0).all() and (plain[mask] > 0).all()
    with torch.no_grad():
        places = torch.stack(
            [torch.randperm(6, generator=torch.Generator().manual_seed(t)) for t in range(T)]
        )
        student = torch.cat([student_TK, torch.full((T, 2), -0.1)], 1).gather(1, places)
        padded = torch.cat([teacher_TK, torch.full((T, 2), -torch.inf)], 1).gather(1, places)
        student[2], padded[2] = torch.nan, torch.nan
    student.requires_grad_()
    found = teacher_divergence(student, padded, mask, beta=beta)
    (other,) = torch.autograd.grad(found.sum(), student)
    assert torch.allclose(found, plain, rtol=1e-5, atol=1e-7) and found[2] == 0
    back = torch.zeros_like(other).scatter(1, places, other)
    assert torch.allclose(back[:, :4], gradient, rtol=1e-4, atol=1e-6) and (back[:, 4:] == 0).all()


def test_rounding_of_the_rest_stays_small_and_finite() -> None:
    """In fp32, where all other tokens of one or both have no probability left."""
    logits = torch.tensor([[30.0, 0, 0], [0.0, 0, 0], [30.0, 0, 0]]).requires_grad_()
    teacher = torch.tensor([[30.0, 1, 0], [30.0, 1, 0], [0.0, 1, 0]]).log_softmax(1)
    for beta in (1.0, 0.0, 0.3):
        found = teacher_divergence(*top(logits, teacher, 2), torch.ones(3).bool(), beta=beta)
        (gradient,) = torch.autograd.grad(found.sum(), logits)
        assert gradient.isfinite().all() and found[0].abs() < 1e-5 and (found[1:] > 0.2).all()


@pytest.mark.parametrize("beta", [1.0, 0.0, 0.3])
def test_what_fp32_leaves_of_a_whole_distribution_is_no_divergence(beta: float) -> None:
    """1 minus the sum of all probabilities is rounding, of either sign; equal distributions differ by 0."""
    logits = 3 * torch.randn(500, VOCAB, generator=torch.Generator().manual_seed(0))
    student = (logits + 7.0).log_softmax(1)  # differently rounded
    found = teacher_divergence(student, logits.log_softmax(1), torch.ones(500).bool(), beta=beta)
    # each of 12 log-probs is off by an ulp of at most 9.5e-7 (they reach -20) times its probability
    assert found.abs().max() < 1e-6
