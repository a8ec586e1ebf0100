"""Scores of rows, and the losses of reward models, against plain fp64 loops."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from golden_cases import load_case
from torch import Tensor

from megarl.algorithms.preference import bradley_terry
from megarl.algorithms.reward_model import ranked_right, ranking_losses, row_scores, step_losses
from megarl.types import MicrobatchRows, PreferenceBatch, StepBatch, TokenOutputs

LENGTHS, PROMPTS = (5, 3, 7, 2), (2, 1, 3, 2)  # the last row is a prompt without a response
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0)
SPANS = list(zip(CU_SEQLENS.tolist(), CU_SEQLENS[1:].tolist(), strict=False))
MASK = torch.cat([torch.arange(n) >= p - 1 for n, p in zip(LENGTHS, PROMPTS, strict=True)])
MASK[CU_SEQLENS[1:] - 1] = False


def numbers(seed: int, count: int = sum(LENGTHS)) -> Tensor:
    return (
        torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    )


def weighted(values: Tensor, gates: Tensor) -> float:
    shares = [math.exp(gate) for gate in gates.tolist()]
    return sum(share * value for share, value in zip(shares, values.tolist(), strict=True)) / sum(
        shares
    )


PLAIN = {
    "sum": lambda values, gates: sum(values.tolist()),
    "mean": lambda values, gates: sum(values.tolist()) / len(values),
    "max": lambda values, gates: max(values.tolist()),
    "min": lambda values, gates: min(values.tolist()),
    "weighted": weighted,
}


@pytest.mark.parametrize("aggregate", ["last", *PLAIN])
def test_scores_are_those_of_a_plain_loop(aggregate: str) -> None:
    """Of the response's own tokens, not of the positions that predict them: one later."""
    values, gates = numbers(0), numbers(1)
    outputs = TokenOutputs(values_T=values.clone().requires_grad_(), gates_T=gates)
    scores = row_scores(outputs, MASK, CU_SEQLENS, aggregate)
    for (start, end), prompt, score in zip(SPANS, PROMPTS, scores.tolist(), strict=True):
        first = start + prompt
        plain = values[end - 1].item()
        if aggregate != "last":
            plain = PLAIN[aggregate](values[first:end], gates[first:end]) if end > first else 0.0
        assert score == pytest.approx(plain, rel=1e-12)
    scores.sum().backward()
    assert outputs.values_T.grad.isfinite().all()
    if aggregate not in ("last", "sum"):  # the shares of a row add up to one
        sums = [outputs.values_T.grad[start:end].sum().item() for start, end in SPANS]
        assert sums == pytest.approx([1.0, 1.0, 1.0, 0.0])


@pytest.mark.parametrize("aggregate", ["last", *PLAIN])
def test_a_microbatch_without_rows_has_no_scores(aggregate: str) -> None:
    nothing = torch.zeros(0, requires_grad=True)
    outputs = TokenOutputs(values_T=nothing, gates_T=nothing)
    scores = row_scores(outputs, nothing.bool(), torch.tensor([0]), aggregate)
    assert scores.shape == (0,)
    scores.sum().backward()


def rankings(margins: Tensor | None = None) -> tuple[PreferenceBatch, MicrobatchRows]:
    """Three responses of one prompt, and all pairs: row 1 is best, then 0, then 2."""
    pairs, size = torch.tensor([[1, 0], [1, 2], [0, 2]]), sum(LENGTHS[:3])
    batch = PreferenceBatch(
        tokens=torch.zeros(size, dtype=torch.int64),
        labels=torch.zeros(size, dtype=torch.int64),
        mask=MASK[:size],
        cu_seqlens=CU_SEQLENS[:4],
        temperature=1.0,
        group=torch.zeros(3, dtype=torch.int64),
        pairs=pairs,
        margins=torch.zeros(3) if margins is None else margins,
    )
    return batch, MicrobatchRows((0, 1, 2), torch.arange(size), batch.cu_seqlens, batch.mask)


def ranked(scores: list[float], *, margins: Tensor | None = None, centre: float = 0.0):
    batch, rows = rankings(margins)
    values = torch.zeros(batch.num_tokens, dtype=torch.float64)
    values[batch.cu_seqlens[1:] - 1] = torch.tensor(scores, dtype=torch.float64)
    values.requires_grad_()
    loss = partial(
        ranking_losses,
        batch,
        lambda out, at: row_scores(out, at.mask, at.cu_seqlens, "last"),
        centre,
    )
    losses = loss(TokenOutputs(values_T=values), rows)
    losses.loss.sum().backward()
    return losses, values.grad[batch.cu_seqlens[1:] - 1].tolist()


def test_every_pair_counts_and_only_differences_matter() -> None:
    scores, margins, centre = [0.3, -0.4, 1.1], torch.tensor([0.5, 0.0, 2.0]), 0.01
    losses, gradient = ranked(scores, margins=margins, centre=centre)
    by_row, slope, hits = [0.0] * 3, [0.0] * 3, 0
    for (better, worse), margin in zip(((1, 0), (1, 2), (0, 2)), margins.tolist(), strict=True):
        x, total = scores[better] - scores[worse] - margin, scores[better] + scores[worse]
        by_row[better] += math.log1p(math.exp(-x)) + centre * total**2
        hits += x + margin > 0
        for row, sign in ((better, 1), (worse, -1)):
            slope[row] += -sign / (1 + math.exp(x)) + 2 * centre * total
    last = CU_SEQLENS[1:4] - 1
    assert (
        losses.loss[last].tolist() == pytest.approx(by_row)
        and losses.loss.sum() == losses.loss[last].sum()
    )
    assert gradient == pytest.approx(slope)
    assert (int(losses.count), int(losses.sums["accuracy"])) == (3, hits)
    shifted = ranked([score + 7.0 for score in scores], margins=margins)[0]
    assert shifted.loss.tolist() == pytest.approx(
        ranked(scores, margins=margins)[0].loss.tolist(), abs=1e-12
    )


def test_a_tie_is_half_right() -> None:
    assert ranked_right(
        torch.tensor([2.0, 1.0, 1.0]), torch.tensor([[0, 1], [1, 2], [2, 0]])
    ).tolist() == [1, 0.5, 0]


@pytest.mark.parametrize(("difference", "expected"), [(200.0, 0.0), (-200.0, 200.0), (-1e4, 1e4)])
def test_losses_are_finite_at_any_score(difference: float, expected: float) -> None:
    losses, gradient = ranked([0.0, difference, 0.0])
    assert losses.loss[CU_SEQLENS[2] - 1].item() == pytest.approx(2 * expected) and all(
        map(math.isfinite, gradient)
    )
    batch = StepBatch(**steps() | {"is_right": MASK})
    outputs = TokenOutputs(values_T=torch.full((sum(LENGTHS),), difference))
    rows = MicrobatchRows((0, 1, 2, 3), torch.arange(sum(LENGTHS)), CU_SEQLENS, MASK)
    assert step_losses(batch, outputs, rows).loss[MASK].tolist() == pytest.approx(
        [expected] * int(MASK.sum())
    )


def steps() -> dict:
    zeros = torch.zeros(sum(LENGTHS), dtype=torch.int64)
    return {
        "tokens": zeros,
        "labels": zeros,
        "mask": MASK,
        "cu_seqlens": CU_SEQLENS,
        "temperature": 1.0,
    }


def test_a_step_is_right_with_the_probability_of_its_score() -> None:
    values, is_right = numbers(3), numbers(4) > 0
    batch = StepBatch(**steps(), is_right=is_right)
    hidden = torch.where(MASK, values, torch.nan).requires_grad_()
    rows = MicrobatchRows((0, 1, 2, 3), torch.arange(sum(LENGTHS)), CU_SEQLENS, MASK)
    losses = step_losses(batch, TokenOutputs(values_T=hidden), rows)
    probability = 1 / (1 + (-values).exp())
    plain = -torch.where(is_right, probability, 1 - probability).log()
    torch.testing.assert_close(losses.loss, torch.where(MASK, plain, 0.0))
    hits = ((values > 0) == is_right)[MASK].sum()
    assert (losses.sums["accuracy"], losses.count) == (hits, MASK.sum())
    losses.loss.sum().backward()
    torch.testing.assert_close(hidden.grad, torch.where(MASK, probability - is_right.double(), 0.0))


@pytest.mark.parametrize("name", ["openrlhf.rm.pairwise", "openrlhf.rm.pairwise_margin"])
def test_openrlhf_has_the_same_loss(name: str) -> None:
    golden = load_case("dpo", "f32")
    better, worse = golden.raw("rm_chosen").clone().requires_grad_(), golden.raw("rm_rejected")
    margins = golden.raw("margin") if name.endswith("margin") else torch.zeros(len(worse))
    pairs = torch.arange(2 * len(worse)).view(2, -1).T
    loss = bradley_terry(torch.cat([better, worse]), pairs, margins).mean()
    loss.backward()
    torch.testing.assert_close(loss, golden.output(name, "loss"), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(better.grad, golden.output(name, "grad_a"), rtol=1e-5, atol=1e-6)
