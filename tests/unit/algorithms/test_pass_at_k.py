"""pass@k against all subsets of the samples; intervals against simulated evaluations."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations
from math import isclose, prod
from statistics import fmean

import pytest

from megarl.algorithms.pass_at_k import ks_of, mean_interval, pass_at_k

Interval = Callable[[list[float], int], tuple[float, float]]


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample() -> None:
    for samples in range(1, 8):
        for correct in range(samples + 1):
            is_correct = [index < correct for index in range(samples)]
            for k in range(1, samples + 1):
                share = fmean(any(subset) for subset in combinations(is_correct, k))
                assert isclose(pass_at_k(samples, correct, k), share, abs_tol=1e-12)


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="pass@5 needs at least 5 samples of a problem, not 4"):
        pass_at_k(4, 1, 5)


def test_which_k_are_reported() -> None:
    assert [ks_of(samples) for samples in (1, 2, 3, 4, 6, 16)] == [
        [],
        [2],
        [2, 3],
        [2, 4],
        [2, 4, 6],
        [2, 4, 8, 16],
    ]


def test_one_sample_per_problem_gives_wilsons_interval() -> None:
    """The values of R's prop.test(7, 10, correct=FALSE) and prop.test(0, 20, correct=FALSE)."""
    assert mean_interval([1.0] * 7 + [0.0] * 3, 1) == pytest.approx(
        (0.3967781, 0.8922087), abs=1e-6
    )
    assert mean_interval([0.0] * 20, 1) == pytest.approx((0.0, 0.1611252), abs=1e-6)


def test_intervals_stay_within_0_and_1_and_never_shrink_to_a_point() -> None:
    for score in (0.0, 1.0):
        low, high = mean_interval([score] * 30, 8)
        assert 0 <= low <= score <= high <= 1 and 0.08 < high - low < 0.15, (
            "30 problems, however many samples"
        )
    low, high = mean_interval([0.5] * 30, 8)
    assert 0.1 < high - low < 0.13, "problems that do not differ: 240 independent samples"
    assert mean_interval([0.25], 1)[1] > 0.7


def test_rewards_get_the_normal_interval() -> None:
    assert mean_interval([-1.0, 3.0, 1.0], None) == pytest.approx(
        (1 - 2.2632, 1 + 2.2632), abs=1e-3
    )


def independent(scores: list[float], samples: int) -> tuple[float, float]:
    """The wrong interval: as if all samples were independent."""
    return mean_interval(
        [
            float(index < fmean(scores) * len(scores) * samples)
            for index in range(len(scores) * samples)
        ],
        1,
    )


def coverage(
    interval: Interval, *, problems: int, samples: int, k: int, a: float, b: float
) -> float:
    """The share of 1000 simulated evaluations whose interval has the true pass@k; difficulties are Beta(a, b)."""
    draw = random.Random(f"{problems}/{samples}/{k}/{a}/{b}")
    truth = 1 - prod((b + i) / (a + b + i) for i in range(k))  # E[1 - (1 - p)^k]
    covered = 0
    for _ in range(1000):
        scores = []
        for _ in range(problems):
            p = draw.betavariate(a, b)
            scores.append(pass_at_k(samples, sum(draw.random() < p for _ in range(samples)), k))
        low, high = interval(scores, samples)
        covered += low <= truth <= high
    return covered / 1000


@pytest.mark.parametrize(
    ("problems", "samples", "k", "a", "b"),
    [
        (30, 1, 1, 1.0, 1.0),
        (30, 8, 1, 0.3, 0.7),  # AIME: 30 problems, most of them easy or hopeless
        (30, 8, 4, 0.3, 0.7),
        (30, 4, 4, 0.2, 0.8),
        (100, 4, 1, 0.5, 0.5),
        (30, 8, 1, 20.0, 20.0),  # problems of about the same difficulty
    ],
)
def test_intervals_cover_the_truth(problems: int, samples: int, k: int, a: float, b: float) -> None:
    case = {"problems": problems, "samples": samples, "k": k, "a": a, "b": b}
    assert 0.93 <= coverage(mean_interval, **case) <= 0.975
    if samples > 1 and a < 1 and k == 1:
        assert coverage(independent, **case) < 0.8, "samples of one problem are not independent"
