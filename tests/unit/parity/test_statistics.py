"""Trainer against engine on the sampled tokens: the figures by hand, and the cause that each pattern suggests."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megarl.parity.statistics import (
    LOG_SOFTMAX_ERROR,
    MAX_EXCESS,
    Excess,
    Parity,
    Quantiles,
    compare,
    explain,
    rounding_floor,
)

CU = torch.tensor([0, 4, 8, 12])
MASK = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0]).bool()  # 2, 3 and 0 sampled tokens
ROLLOUT = torch.arange(12) / -10


def measure(change: dict[int, float]) -> Parity:
    """The trainer's log-probs are the engine's, plus `change` by position."""
    old = ROLLOUT.clone()
    for position, by in change.items():
        old[position] += by
    batch = SimpleNamespace(mask=MASK, cu_seqlens=CU, rollout_logprobs=ROLLOUT, old_logprobs=old)
    return compare(batch)  # pyright: ignore[reportArgumentType]


def test_by_hand() -> None:
    parity = measure({2: 0.25, 5: -0.5, 0: 9.0, 11: math.nan})
    k3 = (math.exp(0.25) - 1 - 0.25 + math.exp(-0.5) - 1 + 0.5) / 5
    assert (parity.row, parity.position) == (1, 1)
    assert (parity.trainer, parity.engine) == pytest.approx((-1.0, -0.5))
    assert (parity.mean, parity.max, parity.kl) == pytest.approx((0.15, 0.5, k3), rel=1e-6)
    assert (parity.share_off, parity.share_above, parity.early) == pytest.approx((0.4, 0.2, 0.0))
    assert measure({4: 0.125}).early == pytest.approx(0.125)


def test_nan_is_infinite_and_an_empty_batch_agrees() -> None:
    assert measure({6: math.nan}).max == math.inf
    empty = SimpleNamespace(
        mask=MASK & False, cu_seqlens=CU, rollout_logprobs=ROLLOUT, old_logprobs=ROLLOUT
    )
    for parity in (compare(empty), measure({})):  # pyright: ignore[reportArgumentType]
        assert (parity.mean, parity.max, parity.kl) == (0.0, 0.0, 0.0)


def pattern(diff: Tensor) -> Parity:
    """`diff` [100]: trainer - engine on one row."""
    mask, cu = torch.ones(100, dtype=torch.bool), torch.tensor([0, 100])
    return compare(
        SimpleNamespace(mask=mask, cu_seqlens=cu, rollout_logprobs=0 * diff, old_logprobs=diff)
    )  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("diff", "is_moe", "words"),
    [
        (torch.linspace(-1, -0.5, 100), False, "more probability .* temperature 0.7"),
        (torch.linspace(0.5, 1, 100), False, "less probability .* temperature 0.7"),
        (
            torch.linspace(0, 1, 100) * (-1) ** torch.arange(100),
            False,
            "KV cache that was not reset",
        ),
        (0.02 * (-1) ** torch.arange(100) + (torch.arange(100) == 9), True, "routing"),
        (
            0.02 * (-1) ** torch.arange(100) + (torch.arange(100) % 50 == 0),
            False,
            "lower-precision kernels",
        ),
        ((-1.0) ** torch.arange(100), False, "weights are not the trainer"),
    ],
    ids=["more", "less", "positions", "routing", "kernels", "weights"],
)
def test_causes(diff: Tensor, is_moe: bool, words: str) -> None:
    text = explain(pattern(diff), is_moe=is_moe, temperature=0.7)
    assert re.search(words, text), text


def test_quantiles_and_floor_by_hand() -> None:
    diff_K = torch.tensor([0.1, -0.5, 0.3, -0.2, 0.4])
    quantiles = Quantiles.of(diff_K)
    assert (quantiles.median, quantiles.p90, quantiles.max) == pytest.approx(
        (0.3, 0.5, 0.5)
    ) and quantiles.count == 5
    assert Quantiles.of(torch.tensor([0.1, math.nan])) == Quantiles(math.inf, math.inf, math.inf, 2)
    assert Quantiles.of(diff_K[:0]) == Quantiles(0.0, 0.0, 0.0, 0)
    # torch.quantile takes 16 million
    many_K = torch.rand(20_000_000, generator=torch.Generator().manual_seed(0))
    assert (Quantiles.of(many_K).median, Quantiles.of(many_K).p90) == pytest.approx(
        (0.5, 0.9), abs=1e-3
    )
    floor = rounding_floor(torch.tensor([-2.0, -4.0]), torch.tensor([[0.1, -0.1], [0.1, 0.1]]))
    assert (floor.median, floor.p90, floor.count) == pytest.approx(
        (0.1 * 2**0.5 + 2**-22 * 3,) * 2 + (4,)
    )
    exact = rounding_floor(torch.tensor([-2.0, -4.0]), torch.zeros(2, 2), error=LOG_SOFTMAX_ERROR)
    assert exact.median == exact.p90 == pytest.approx(2**-22 * 3 + 2**-17)


def test_excess_by_hand() -> None:
    def excess(median: float, p90: float, count: int = 10**8) -> Excess:
        return Excess(Quantiles(median, p90, 9.0, count), Quantiles(0.1, 0.2, 0.0, 1))

    assert (excess(0.3, 0.2).statistic, excess(0.1, 0.4).statistic) == pytest.approx((9, 4))
    assert excess(0.3, 0.2).limit == pytest.approx(MAX_EXCESS, rel=1e-3)
    assert excess(0.14, 0.2).is_explained and not excess(0.15, 0.2).is_explained
    assert (
        excess(0.15, 0.2, count=4).limit == pytest.approx(4 * MAX_EXCESS)
        and excess(0.15, 0.2, count=4).is_explained
    )
    assert Excess(Quantiles(0.0, 0.0, 0.0, 0), Quantiles(0.0, 0.0, 0.0, 0)).is_explained, (
        "no tokens"
    )
