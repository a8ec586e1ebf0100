"""Iterative GRPO with the real engine: what each iteration begins with, and runs that end in each of its phases."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from iterative_ranks import PHASES
from start_ranks import run_ranks

pytestmark = pytest.mark.long
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("iterative")
    run_ranks(HERE / "iterative_ranks.py", 1, str(folder))
    return json.loads((folder / "results.json").read_text())


def test_the_reference_becomes_the_policy(found: dict[str, Any]) -> None:
    whole = found["whole"]
    assert len(whole["resets"]) == 2 and all(
        reference == policy for reference, policy in whole["resets"]
    )
    assert whole["resets"][0] != whole["resets"][1], "the policy has moved"
    assert [row["kl/ref"] == 0.0 for row in whole["metrics"]] == [True, False, True, False]


def test_a_tenth_of_what_is_trained_on_is_history(found: dict[str, Any]) -> None:
    """Counted from the rows of each batch."""
    seen, first = set[str](), set[str]()
    for number, batch in enumerate(found["whole"]["batches"]):
        groups: dict[int, str] = {}
        for group, row in batch:
            groups[group] = groups.get(group, "") + str(row)
        old = [group for group in groups.values() if group in seen]
        assert len(old) == (math.ceil(0.1 * len(groups)) if number >= 2 else 0), number
        assert len(set(groups.values())) == len(groups), "without replacement"
        first |= set(groups.values())
        seen |= first if number == 1 else set()  # the history is of earlier iterations
    rows = [row for row in found["whole"]["metrics"] if "reward_model/rankings" in row]
    assert [row["step"] for row in rows] == [0, 2]
    assert rows[1]["reward_model/replayed"] == 2 and rows[1]["reward_model/history"] == 8


@pytest.mark.parametrize("phase", PHASES)
def test_a_run_that_ends_in_any_phase_goes_on_bit_for_bit(
    found: dict[str, Any], phase: str
) -> None:
    whole, stopped = found["whole"], found["stopped"][phase]
    saved = {"first_reward_model": 0, "policy": 3}.get(phase, 2)
    assert stopped["saved"] == [f"step_{step}" for step in range(1, saved + 1)]
    assert stopped["bits"] == whole["bits"]
    for name in (
        "loss",
        "grad_norm",
        "kl/ref",
        "rollout/digest",
        "reward/model/mean",
        "reward_model/replayed",
    ):
        assert [row.get(name) for row in stopped["metrics"]] == [
            row.get(name) for row in whole["metrics"]
        ], name


def test_a_reward_model_in_the_loop_scores_as_transformers_and_a_server_do(
    found: dict[str, Any],
) -> None:
    scored = found["scored"]
    assert len(scored["loop"]) == 16 and max(scored["loop"]) - min(scored["loop"]) > 0.1
    assert scored["loop"] == pytest.approx(scored["transformers"], abs=1e-5)
    assert scored["server"] == pytest.approx(scored["loop"], abs=1e-5)
    assert scored["metrics"][0]["reward/model/mean"] == pytest.approx(
        sum(scored["loop"]) / 16, abs=1e-5
    )
