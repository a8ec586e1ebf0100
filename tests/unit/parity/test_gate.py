"""Parity on one rank, between an engine and a trainer whose log-probs are known; with real ones in tests/e2e."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.parity.gate import Measured, ParityChecks, sampled_rows
from megarl.parity.statistics import Quantiles
from megarl.types import CheckFailed, ScoredBatch, TokenBatch
from megarl.weights.sync.transports import Transport

FLOOR = Quantiles(0.01, 0.02, 0.05, 64)
PROMPTS = [(3, 1), (4, 1, 5, 9)]


def logprob(before: Tensor, token: Tensor) -> Tensor:
    """Depends on both, so that a comparison of shifted tokens fails."""
    return -1 - ((7 * before + 3 * token) % 11).float()


@dataclass
class Engine:
    error: float = 0.0
    is_asleep: bool = False

    def complete(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[Tensor]:
        return [
            torch.tensor([*prompt, *((17 * prompt[0] + k * k) % 64 for k in range(max_tokens))])
            for prompt in prompts
        ]

    def score(self, rows: Sequence[Tensor]) -> list[Tensor]:
        return [logprob(row[:-1], row[1:]) + self.error for row in rows]


class Trainer:
    """`ParityChecks.measure`."""

    def __init__(self, floor: Quantiles = FLOOR) -> None:
        self.floor, self.batches = floor, []

    def __call__(self, batch: TokenBatch) -> Measured:
        self.batches.append(batch)
        return Measured(logprob(batch.tokens, batch.labels)[batch.mask], self.floor, self.floor)


def checks(error: float = 0.0, **options: Any) -> tuple[ParityChecks, Trainer]:
    trainer = Trainer()
    return ParityChecks(Transport(), trainer, [Engine(error)], PROMPTS, 24, **options), trainer


def scored(num_rows: int, **values: Any) -> ScoredBatch:
    """Other values are zeros."""
    zeros: dict[str, Any] = {field.name: torch.zeros(num_rows) for field in fields(ScoredBatch)} | {
        "choices": ()
    }
    return ScoredBatch(**zeros | values)


def batch_of(diff: float, count: int = 100, prompts: int = 1) -> ScoredBatch:
    """One row, of which each second token is sampled; the others are far off."""
    sampled = torch.arange(2 * count) % 2 == 0
    old = torch.full((2 * count,), -2.0)
    rollout = torch.where(sampled, old - diff, 5.0)
    tokens = {name: torch.zeros(2 * count, dtype=torch.int64) for name in ("tokens", "labels")}
    cu = torch.tensor([0, 2 * count])
    return scored(
        1,
        mask=sampled,
        old_logprobs=old,
        rollout_logprobs=rollout,
        cu_seqlens=cu,
        temperature=0.7,
        prompt_id=torch.arange(prompts),
        **tokens,
    )


def test_the_probe_scores_what_the_engine_added_at_temperature_1() -> None:
    parity, trainer = checks(error=0.005)
    _, (excess,) = parity.probe()
    assert (excess.found.count, excess.floor) == (48, FLOOR)
    assert (excess.found.median, excess.found.max) == pytest.approx((0.005, 0.005), rel=1e-3)
    (batch,) = trainer.batches
    assert batch.temperature == 1.0 and batch.cu_seqlens.tolist() == [0, 26, 54]
    assert [tuple(batch.tokens[:2].tolist()), tuple(batch.tokens[26:30].tolist())] == PROMPTS
    parity.check()


@pytest.mark.parametrize(
    ("error", "max_diff"), [(0.1, None), (math.nan, None), (0.005, 0.004), (math.nan, 9.0)]
)
def test_a_probe_that_is_off_is_refused_with_its_distance(
    error: float, max_diff: float | None
) -> None:
    parity, _ = checks(error, max_diff=max_diff)
    bound = (
        f"checks.max_logprob_diff={max_diff:g}"
        if max_diff
        else "median 0.01, 90% below 0.02; statistic"
    )
    with pytest.raises(
        CheckFailed,
        match=f"differ from the trainer's by up to {'inf' if error != error else error}.*{bound}",
    ):
        parity.check()
    checks(0.1, max_diff=0.2)[0].check()


def test_a_batch_is_compared_with_an_earlier_floor_and_refused_with_its_own() -> None:
    parity, trainer = checks()
    parity.probe()
    metrics = parity.parity(batch_of(0.01))
    # all tokens differ by the same, of which k3 is exp(x) - 1 - x
    assert metrics["logprob_diff/mean"] == pytest.approx(0.01, rel=1e-4)
    assert metrics["logprob_diff/max"] == pytest.approx(0.01, rel=1e-4)
    assert metrics["kl/rollout"] == pytest.approx(0.01**2 / 2, rel=1e-2)
    assert (
        metrics["logprob_diff/statistic"] == pytest.approx(1, rel=1e-3)
        and len(trainer.batches) == 1
    )
    with pytest.raises(CheckFailed, match=r"statistic 25, at most 2\.88.*Nothing was updated"):
        parity.parity(batch_of(0.05))
    assert len(trainer.batches) == 2, "measured on the batch that is refused"
    trainer.floor = Quantiles(0.05, 0.05, 0.05, 1)
    assert parity.parity(batch_of(0.05))["logprob_diff/statistic"] == pytest.approx(1, rel=1e-3)
    assert parity.floor == trainer.floor and len(trainer.batches) == 3


def test_the_floor_is_measured_again_where_half_the_limit_is_used_up_but_not_every_time() -> None:
    parity, trainer = checks()
    parity.probe()
    for step in range(15):
        statistic = parity.parity(batch_of(0.0125))["logprob_diff/statistic"]
        assert statistic == pytest.approx(1.5625, rel=1e-3)
        assert len(trainer.batches) == 1 + (step >= 0) + (step >= 11), f"step {step}"


def test_with_experts_prompts_are_independent_and_their_tokens_are_not() -> None:
    dense, moe = checks(error=0.015)[0], checks(error=0.015, is_moe=True)[0]
    (of_dense,), (of_moe,) = dense.probe()[1], moe.probe()[1]
    assert (of_dense.limit, of_moe.limit) == pytest.approx(
        (2 * (1 + 2 / 48**0.5) ** 2, 2 * (1 + 2 / 2**0.5) ** 2)
    )
    metrics = moe.parity(batch_of(0.019, prompts=16))
    assert (
        metrics["logprob_diff/statistic"] == pytest.approx(3.61, rel=1e-3)
        and metrics["logprob_diff/limit"] == 4.5
    )
    with pytest.raises(CheckFailed, match=r"statistic 3\.61, at most 2\.88"):
        dense.parity(batch_of(0.019, prompts=16))
    with pytest.raises(CheckFailed, match=r"statistic 3\.61, at most 3\.37"):
        moe.parity(batch_of(0.019, prompts=45))


def test_a_bound_of_the_config_replaces_what_rounding_explains() -> None:
    parity, _ = checks(max_diff=0.04)
    assert parity.parity(batch_of(0.03))["logprob_diff/statistic"] > 4
    with pytest.raises(CheckFailed, match=r"0.05 at most.*checks.max_logprob_diff=0.04"):
        parity.parity(batch_of(0.05))


def test_a_batch_without_sampled_tokens_passes() -> None:
    parity, _ = checks()
    assert parity.parity(batch_of(0.0, count=0))["logprob_diff/statistic"] == 0


def test_rows_for_the_cause_are_sampled_ones_and_begin_with_the_worst() -> None:
    lengths = [2, 3, 1, 4]
    tokens_T, mask = torch.arange(10), torch.tensor([1, 0, 0, 0, 0, 1, 0, 1, 1, 0]).bool()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    values = {
        "tokens": tokens_T,
        "labels": tokens_T + 1,
        "mask": mask,
        "cu_seqlens": cu_seqlens,
        "temperature": 0.7,
    }
    batch = scored(4, **values, rollout_logprobs=-tokens_T.float())
    few = sampled_rows(batch, 2, first=3)
    assert few.tokens.tolist() == [6, 7, 8, 9, 0, 1] and few.cu_seqlens.tolist() == [0, 4, 6]
    assert few.labels.tolist() == [7, 8, 9, 10, 1, 2] and few.rollout_logprobs.tolist() == [
        -6,
        -7,
        -8,
        -9,
        0,
        -1,
    ]
    assert few.mask.tolist() == [False, True, True, False, True, False]
    assert sampled_rows(batch, 8).tokens.tolist() == [0, 1, 5, 6, 7, 8, 9], (
        "row 1 has no sampled token"
    )


@dataclass
class Cause:
    """`ParityChecks.find`."""

    cause: str | None
    rows: int = 0

    def __call__(
        self, batch: TokenBatch, floor: Quantiles, rollout_logprobs_T: Tensor | None = None
    ) -> str | None:
        self.rows = batch.num_rows
        return self.cause


def test_a_refusal_names_the_cause_where_the_engine_can_compute() -> None:
    find = Cause("layer 3 (attention)")
    parity, _ = checks(0.1, find=find)
    with pytest.raises(CheckFailed, match=r"statistic .*; cause: layer 3 \(attention\)$"):
        parity.check()
    assert find.rows == len(PROMPTS)
    batch = batch_of(0.05)
    with pytest.raises(CheckFailed, match=r"; cause: layer 3 \(attention\)\. Nothing was updated"):
        parity.parity(batch)
    find.cause = None
    with pytest.raises(
        CheckFailed, match=r"; cause: the engine gives nearly all tokens less probability"
    ):
        parity.parity(batch)
    (engine,) = parity.engines
    assert isinstance(engine, Engine)
    engine.is_asleep = True
    with pytest.raises(
        CheckFailed, match=r"less probability.*`megarl check --parity` looks for the cause"
    ):
        parity.parity(batch)


def stale_batch(versions: list[int], *, diff: float = 0.01) -> ScoredBatch:
    """A row for each version, whose last token is of the newest; older ones differ by 5 nats."""
    count, newest = 40, max(versions)
    versions_T = torch.tensor(versions, dtype=torch.int32).repeat_interleave(count)
    versions_T[count - 2] = newest
    mask_T = torch.arange(count * len(versions)) % count < count - 1
    old_T = torch.where(mask_T, -2.0, 0.0)
    zeros_T = torch.zeros(count * len(versions))
    return ScoredBatch(
        tokens=zeros_T.long(), labels=zeros_T.long(), mask=mask_T, cu_seqlens=torch.arange(len(versions) + 1) * count,
        temperature=1.0, old_logprobs=old_T, rollout_logprobs=old_T - torch.where(versions_T == newest, diff, 5.0),
        versions=torch.where(mask_T, versions_T, -1), token_rewards=zeros_T, step_ends=zeros_T.bool(),
        outcome_at=torch.arange(len(versions)) * count, rewards=torch.zeros(len(versions)),
        baseline=torch.zeros(len(versions)), group=torch.arange(len(versions)), prompt_id=torch.arange(len(versions)),
        finish=torch.zeros(len(versions)).long(), advantages=zeros_T, ref_logprobs=None, kl_coef=0.0,
    )  # fmt: skip


def test_tokens_of_older_weights_are_not_judged() -> None:
    """They differ because the trainer has moved on; those of the weights that were just synced must not."""
    version = [3]
    parity, trainer = checks(version=lambda: version[0])
    parity.probe()
    metrics = parity.parity(stale_batch([2, 3, 1]))
    assert (
        metrics["logprob_diff/max"] == pytest.approx(0.01, rel=1e-3) and len(trainer.batches) == 1
    )
    with pytest.raises(CheckFailed, match=r"differ by 0\.5 at most and 0\.5"):
        parity.parity(stale_batch([2, 3, 1], diff=0.5))
    assert trainer.batches[-1].num_rows == 2 and trainer.batches[-1].mask.sum() == 40, (
        "the floor is of these tokens"
    )
    with pytest.raises(CheckFailed, match="differ by 5 at most"):
        checks()[0].parity(stale_batch([2, 3, 1]))
    version[0] = 4
    assert parity.parity(stale_batch([2, 3, 1])) == {}, "the probe has judged the sync"


@pytest.mark.parametrize("follows", [True, False])
def test_choices_are_followed_where_the_engine_made_them(follows: bool) -> None:
    """The trainer's own, which later updates follow, would hide that the engine chose others."""
    parity, trainer = checks(follows_engine=follows)
    parity.parity(replace(batch_of(0.005), choices=(None,)))
    assert [batch.choices for batch in trainer.batches] == [(None,) if follows else ()]
