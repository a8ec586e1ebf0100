"""Bradley-Terry and DPO: the peers' numbers, closed forms, and the same loss however pairs are packed."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from golden_cases import load_case
from torch import Tensor

from megarl.algorithms.objective import planned_rows
from megarl.algorithms.preference import (
    best_and_worst,
    bradley_terry,
    dpo,
    dpo_losses,
    local_pairs,
    pair_losses,
    pair_weights,
    response_logprobs,
)
from megarl.config.schema import Dpo
from megarl.types import MicrobatchPlan, MicrobatchRows, PreferenceBatch, ScoredBatch, TokenOutputs

NONE, KL = "b0.1.ls0.0", "reverse_kl"
GOLDEN = [  # entry, dtypes, options, log-probs averaged over tokens
    (f"trl.dpo.sigmoid.{NONE}.{KL}", ("f32", "f64"), {}, False),
    (f"trl.dpo.sigmoid.b0.5.ls0.0.{KL}", ("f32", "f64"), {"beta": 0.5}, False),
    (f"trl.dpo.sigmoid_norm.{NONE}.{KL}", ("f32", "f64"), {}, True),
    (f"trl.dpo.hinge.{NONE}.{KL}", ("f32", "f64"), {"loss": "hinge"}, False),
    (f"trl.dpo.ipo.{NONE}.{KL}", ("f32", "f64"), {"loss": "ipo"}, True),
    (
        f"trl.dpo.robust.b0.1.ls0.1.{KL}",
        ("f32", "f64"),
        {"loss": "robust", "label_smoothing": 0.1},
        False,
    ),
    ("openrlhf.dpo.b0.1.ls0.0.ipo0", ("f32",), {}, False),
    ("openrlhf.dpo.b0.1.ls0.1.ipo0", ("f32",), {"label_smoothing": 0.1}, False),
    ("openrlhf.dpo.b0.1.ls0.0.ipo1", ("f32",), {"loss": "ipo"}, False),
    ("areal.dpo", ("f32",), {}, False),
    ("nemo.dpo", ("f32",), {}, False),
]


@pytest.mark.parametrize(
    ("entry", "dtypes", "options", "average"), GOLDEN, ids=lambda value: str(value)
)
def test_dpo_is_the_peers(
    entry: str, dtypes: tuple[str, ...], options: dict, average: bool
) -> None:
    """Loss and gradient; NaN stands at masked positions."""
    for dtype in dtypes:
        case = load_case("dpo", dtype)
        mask, pairs = case.raw("mask").bool().flatten(), torch.arange(10).view(2, 5).T
        policy_T, reference_T = (
            torch.where(mask, case.raw(name).flatten(), float("nan"))
            for name in ("policy_logps", "ref_logps")
        )
        policy_T.requires_grad_()
        reduced = (mask, torch.arange(11) * 9)
        rows = (
            response_logprobs(x_T, *reduced, average=average) for x_T in (policy_T, reference_T)
        )
        loss = dpo(*rows, pairs, Dpo(**options)).mean()
        loss.backward()
        close = {"rtol": 1e-9, "atol": 1e-12} if dtype == "f64" else {"rtol": 1e-5, "atol": 1e-6}
        expected, gradient = case.output(entry, "loss"), case.output(entry, "grad_p")
        assert expected is not None and gradient is not None and policy_T.grad is not None
        torch.testing.assert_close(loss.detach().to(expected.dtype), expected, **close)
        torch.testing.assert_close(policy_T.grad, torch.where(mask, gradient.flatten(), 0), **close)


@pytest.mark.parametrize("name", ["pairwise", "pairwise_margin"])
def test_bradley_terry_is_openrlhfs(name: str) -> None:
    case = load_case("dpo", "f32")
    scores_N = torch.cat([case.raw("rm_chosen"), case.raw("rm_rejected")]).requires_grad_()
    margins = case.raw("margin") if name == "pairwise_margin" else torch.zeros(5)
    loss = bradley_terry(scores_N, torch.arange(10).view(2, 5).T, margins).mean()
    loss.backward()
    assert scores_N.grad is not None
    torch.testing.assert_close(loss.detach(), case.output(f"openrlhf.rm.{name}", "loss"))
    torch.testing.assert_close(scores_N.grad[:5], case.output(f"openrlhf.rm.{name}", "grad_a"))


def test_bradley_terry_depends_on_differences_and_never_overflows() -> None:
    scores_N, pairs = torch.randn(4, dtype=torch.float64), torch.tensor([[0, 1], [2, 3], [0, 3]])
    none = torch.zeros(3)
    torch.testing.assert_close(
        bradley_terry(scores_N, pairs, none), bradley_terry(scores_N + 7, pairs, none)
    )
    extreme = bradley_terry(
        torch.tensor([200.0, 0.0]), torch.tensor([[0, 1], [1, 0]]), torch.zeros(2)
    )
    torch.testing.assert_close(extreme, torch.tensor([0.0, 200.0]))
    for dtype in (torch.bfloat16, torch.float32):
        huge = bradley_terry(
            torch.tensor([1e30, 0.0], dtype=dtype), torch.tensor([[1, 0]]), torch.zeros(1)
        )
        assert huge.dtype == torch.float32 and huge.isfinite().all()
    centred = bradley_terry(scores_N, pairs, none, centre=0.5) - bradley_terry(
        scores_N, pairs, none
    )
    torch.testing.assert_close(
        centred, 0.5 * (scores_N[pairs[:, 0]] + scores_N[pairs[:, 1]]).square()
    )


def test_at_the_start_dpo_is_log_2_and_its_gradient_half_of_beta() -> None:
    policy_N = torch.tensor([-5.0, -9.0], dtype=torch.float64, requires_grad=True)
    loss_P = dpo(policy_N, policy_N.detach(), torch.tensor([[1, 0]]), Dpo(beta=0.3))
    loss_P.sum().backward()
    assert policy_N.grad is not None
    assert loss_P.item() == pytest.approx(math.log(2), abs=1e-15) and policy_N.grad.tolist() == [
        0.15,
        -0.15,
    ]


def rows_of(batch: PreferenceBatch, rows: tuple[int, ...]) -> MicrobatchRows:
    bounds = batch.cu_seqlens.tolist()
    index = torch.cat(
        [torch.arange(bounds[row], bounds[row + 1]) for row in rows] or [torch.arange(0)]
    )
    lengths = [bounds[row + 1] - bounds[row] for row in rows]
    return MicrobatchRows(rows, index, torch.tensor([0, *lengths]).cumsum(0), batch.mask[index])


def ranked_batch(sizes: list[int], seed: int = 0) -> PreferenceBatch:
    """All pairs of prompts with this many responses each, of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    lengths = torch.randint(3, 8, (len(group),), generator=generator)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    pairs = [
        (s + i, s + j)
        for s, size in zip(starts, sizes, strict=False)
        for i, j in combinations(range(size), 2)
    ]
    total = int(cu_seqlens[-1])
    mask = torch.rand(total, generator=generator) < 0.7
    mask[cu_seqlens[1:] - 1], mask[cu_seqlens[1:] - 2] = False, True
    tokens = torch.zeros(total, dtype=torch.int64)
    return PreferenceBatch(
        tokens=tokens, labels=tokens, mask=mask, cu_seqlens=cu_seqlens, temperature=1.0,
        group=group, pairs=torch.tensor(pairs).reshape(-1, 2), margins=torch.rand(len(pairs), generator=generator),
    )  # fmt: skip


def total(
    batch: PreferenceBatch,
    plan: MicrobatchPlan,
    policy_T: Tensor,
    reference_N: Tensor,
    *,
    by_prompt: bool = False,
) -> tuple[Tensor, dict]:
    """The loss of all micro-batches of a plan of one update, and its metrics."""
    weights_T, losses = pair_weights(batch, plan, by_prompt=by_prompt), []
    for rows in [rows for rank in plan.rows[0] for rows in rank] + [()]:
        part = rows_of(batch, rows)
        outputs = TokenOutputs(policy_T[part.index], entropy_T=policy_T[part.index].detach().exp())
        losses.append((dpo_losses(batch, reference_N, Dpo(beta=0.5), outputs, part), part))
    count = sum(int(each.count) for each, _ in losses)
    metrics = {
        name: float(sum(each.sums[name] for each, _ in losses)) / count
        for name in losses[0][0].sums
    }
    assert all(set(each.sums) == set(metrics) for each, _ in losses), "the same names without rows"
    return torch.stack(
        [(each.loss * part.select(weights_T)).sum() for each, part in losses]
    ).sum(), metrics


def test_the_loss_is_the_mean_over_all_pairs_however_they_are_packed() -> None:
    batch = ranked_batch([2, 4, 3, 2])
    generator = torch.Generator().manual_seed(1)
    policy_T, reference_T = (
        -torch.rand(batch.num_tokens, generator=generator).double() for _ in range(2)
    )
    policy_T[~batch.mask] = reference_T[~batch.mask] = float("nan")
    policy_T.requires_grad_()
    reference_N = response_logprobs(reference_T, batch.mask, batch.cu_seqlens)
    ratios = []  # written out
    for row in range(batch.num_rows):
        span = slice(*batch.cu_seqlens[row : row + 2].tolist())
        ratios.append((policy_T - reference_T)[span][batch.mask[span]].sum())
    margins = [0.5 * (ratios[better] - ratios[worse]) for better, worse in batch.pairs.tolist()]
    losses = -torch.stack([margin.sigmoid().log() for margin in margins])
    expected, of_prompts = (
        losses.mean(),
        torch.stack([part.mean() for part in losses.split([1, 6, 3, 1])]).mean(),
    )
    (gradient,) = torch.autograd.grad(expected, policy_T, retain_graph=True)
    found = []
    for rows in [
        (((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10),),),
        (((9, 10), (2, 3, 4, 5)), ((6, 7, 8, 0, 1), ())),
    ]:
        loss, metrics = total(batch, MicrobatchPlan((rows,), 1.0), policy_T, reference_N)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(
            torch.autograd.grad(loss, policy_T)[0], torch.where(batch.mask, gradient, 0)
        )
        plan = MicrobatchPlan((rows,), 1.0)
        torch.testing.assert_close(
            total(batch, plan, policy_T, reference_N, by_prompt=True)[0], of_prompts
        )
        found.append(metrics)
    assert found[0] == pytest.approx(found[1])
    assert found[0]["rewards/margin"] == pytest.approx(float(torch.stack(margins).mean().detach()))
    assert found[0]["rewards/accuracy"] == pytest.approx(
        sum(margin.item() > 0 for margin in margins) / len(margins)
    )


def test_a_pair_that_is_split_is_refused() -> None:
    batch = ranked_batch([2, 2])
    with pytest.raises(AssertionError, match="split between micro-batches"):
        local_pairs(batch, rows_of(batch, (0, 2, 3)))


def test_every_pair_or_every_prompt_counts_equally() -> None:
    """Nine ranked responses have 36 pairs (K = 9 in arXiv 2203.02155)."""
    batch = ranked_batch([9, 2, 2])
    assert len(batch.pairs) == 38
    plan = MicrobatchPlan(((((*range(9), 9, 10),),), (((11, 12),),)), 1.0)
    for by_prompt, expected in ((False, [1 / 37, 1 / 37, 1]), (True, [1 / 72, 1 / 2, 1])):
        weights_T = pair_weights(batch, plan, by_prompt=by_prompt)
        of_prompt = [weights_T[batch.cu_seqlens[row]].item() for row in (0, 9, 11)]
        assert of_prompt == pytest.approx(expected)
        sums = []
        for update in plan.updates():
            rows = rows_of(
                batch, tuple(planned_rows(update, batch.num_rows).nonzero().flatten().tolist())
            )
            pairs, margins = local_pairs(batch, rows)
            assert margins.tolist() == [
                m
                for m, p in zip(batch.margins.tolist(), batch.pairs, strict=True)
                if p[0] in rows.rows
            ]
            sums.append(
                float(
                    (
                        pair_losses(torch.ones(len(pairs)), {}, pairs, rows).loss
                        * rows.select(weights_T)
                    ).sum()
                )
            )
        assert sums == pytest.approx([1.0, 1.0])


def test_the_best_and_the_worst_of_each_prompt() -> None:
    """Of equal ones the first; nothing of a prompt without spread, and no row without tokens."""
    rewards = [0.5, 1.0, 1.0, 0.0, 0.0, 0.7, 0.7, 3.0, 1.0, 9.0, 2.0, 1e-13, 0.0]
    group = torch.tensor([0] * 5 + [1] * 2 + [2] + [3] * 3 + [4] * 2)  # the last differ by rounding
    mask = torch.ones(26, dtype=torch.bool)
    mask[18:20] = False  # the row with reward 9
    batch = ScoredBatch.__new__(ScoredBatch)
    for name, value in {
        "rewards": torch.tensor(rewards), "group": group, "mask": mask, "cu_seqlens": torch.arange(14) * 2
    }.items():  # fmt: skip
        object.__setattr__(batch, name, value)
    assert best_and_worst(batch) == [1, 3, 10, 8]
