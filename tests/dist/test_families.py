"""Every family in every layout: log-probs and updates are those of transformers and torch, checkpoints come back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_trainer import each

pytestmark = pytest.mark.long
PROGRAM = Path(__file__).with_name("family_ranks.py")


EVERY = [pytest.param(case, marks=pytest.mark.exhaustive) for case in ("every", "all_axes")]


@pytest.fixture(scope="module", params=["each_once", *EVERY])
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    results = tmp_path_factory.mktemp("families") / "results.json"
    command = [sys.executable, "-W", "ignore", PROGRAM, results, request.param]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(results.read_text())
    for name, case in each(found):
        print(
            f"{name}: log-probs differ by {case['logprob_error']:.1e}, losses and norms {case['steps']}"
        )
    return found


def test_each_once_leaves_out_no_family_and_no_layout() -> None:
    from family_ranks import layouts

    once, every = layouts("each_once"), layouts("every")
    for item in (0, 1):
        assert {str(case[item]) for case in once} == {str(case[item]) for case in every}


def test_logprobs_are_those_of_transformers(found: dict[str, Any]) -> None:
    for name, case in each(found):
        assert case["logprob_error"] < 1e-4, name


def test_updates_are_those_of_plain_torch(found: dict[str, Any]) -> None:
    for name, case in each(found):
        for step, tolerance in ((0, 1e-5), (1, 1e-3)):
            assert case["steps"][step] == pytest.approx(
                case["oracle"][step], rel=tolerance, abs=tolerance / 10
            ), name
        assert not case["replicas_differ"], name


def test_checkpoints_come_back_bit_for_bit(found: dict[str, Any]) -> None:
    """Through every layout; each tensor in its own dtype."""
    for name, case in each(found):
        assert case["seen"] == [], name
    assert found["bf16"] and not any(found["bf16"].values()), found["bf16"]
