"""One batch in many layouts on gloo ranks, against plain transformers: loss, gradient norm, every gradient."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.long


def ranks(folder: Path, world: int, *checks: str) -> dict[str, list[dict[str, Any]]]:
    results = folder / "results.json"
    command = [
        sys.executable,
        "-W",
        "ignore",
        HERE / "context_ranks.py",
        results,
        str(world),
        *checks,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(results.read_text())


def assert_equal(cases: list[dict[str, Any]], *, experts: bool) -> None:
    for case in cases:
        name = str(case["parallel"])
        print(
            f"{name}: log-probs differ by {case['logprob_error']:.1e}, gradients by {case['gradient'][0]:.1e}"
        )
        assert case["logprob_error"] < 1e-5, name
        (loss, true_loss), (norm, true_norm) = case["loss"], case["grad_norm"]
        assert true_norm > 1e-2, f"{name}: nothing to compare"
        assert loss == pytest.approx(true_loss, abs=1e-5), name
        assert norm == pytest.approx(true_norm, rel=1e-4), name
        assert case["gradient"][0] < 1e-4, f"{name}: {case['gradient'][1]}"
        aux, z = case["terms"]
        assert bool(experts) == (aux is not None)
        if experts and case["true_terms"] is not None:
            assert case["layers"] * (0.1 * aux + 0.02 * z) == pytest.approx(
                case["true_terms"], rel=1e-4
            ), name


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    checks = (
        "few_dense",
        "few_sparse",
        "plans",
        "idle",
        "families",
        "objectives",
        "dispatcher",
        "recompute",
    )
    return ranks(tmp_path_factory.mktemp("four"), 4, *checks)


@pytest.mark.parametrize(
    ("check", "layouts", "experts"), [("few_dense", 4, False), ("few_sparse", 5, True)]
)
def test_layouts_of_four_ranks(
    four: dict[str, Any], check: str, layouts: int, experts: bool
) -> None:
    assert len(four[check]) == layouts
    assert_equal(four[check], experts=experts)


def test_rows_dealt_at_random(four: dict[str, Any]) -> None:
    counts = [case["microbatches"] for case in four["plans"]]
    assert min(counts) == 1 and max(counts) == 16 and len(set(counts)) >= 4
    assert_equal(four["plans"], experts=True)


@pytest.mark.parametrize("check", ["idle", "families", "dispatcher", "recompute"])
def test_experts_with(four: dict[str, Any], check: str) -> None:
    assert_equal(four[check], experts=True)


def test_objectives_of_whole_rows(four: dict[str, Any]) -> None:
    assert_equal(four["objectives"], experts=False)


def test_bias_of_the_routers_moves_alike(four: dict[str, Any]) -> None:
    """By the rate, up or down, from counts of all ranks; replicas bit for bit."""
    for case in four["families"]:
        moved = case["bias"]
        assert {round(abs(step), 6) for step in moved} <= {0.0, 0.01} and any(moved), case[
            "parallel"
        ]
    by_model = [case["bias"] for case in four["families"]]
    assert by_model[0] == by_model[1] and by_model[2] == by_model[3]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("world", "dense", "sparse"), [(1, 1, 1), (2, 2, 2), (4, 9, 10), (8, 1, 2)]
)
def test_every_layout(tmp_path: Path, world: int, dense: int, sparse: int) -> None:
    plans = ["plans"] if world < 4 else []
    found = ranks(tmp_path, world, "dense", "sparse", *plans)
    assert (len(found["dense"]), len(found["sparse"])) == (dense, sparse)
    assert_equal(found["dense"], experts=False)
    assert_equal(found["sparse"], experts=True)
    if plans:
        assert len(found["plans"]) >= 4
        assert_equal(found["plans"], experts=True)
