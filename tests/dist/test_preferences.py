"""Tensor, pipeline and data parallelism 2 give the losses of one process; pairs are never split."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from start_ranks import run_ranks

from megarl.commands.random_model import create_model
from megarl.config.schema import Create

pytestmark = pytest.mark.long
SMALL = {
    "layers": 2,
    "hidden": 32,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 16,
    "vocab": 67,
    "tokenizer": "none",
}
CASES = ("dpo", "previous", "initial", "best_of_n")
Found = dict[str, list[list[dict[str, float]]]]  # case and layout -> step -> update -> metrics


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("preferences")
    model, results = create_model(Create(**SMALL), folder), {}
    for world in (1, 2):
        file = folder / f"{world}.json"
        run_ranks(
            Path(__file__).parent / "preference_ranks.py",
            world,
            str(model),
            str(file),
            timeout_s=300,
        )
        results |= {
            f"{world} {name}": found for name, found in json.loads(file.read_text()).items()
        }
    return results


@pytest.mark.parametrize("case", CASES)
def test_every_layout_is_one_process(found: Found, case: str) -> None:
    one, *others = (updates for name, updates in found.items() if name.split()[1] == case)
    assert len(others) == 3
    for other in others:
        for step, tolerance in ((0, 1e-5), (1, 1e-3), (2, 1e-2)):
            left_out = {
                "packing/efficiency",
                "rewards/accuracy",
            }  # rounding may change the sign of a margin
            for update, (ours, theirs) in enumerate(zip(other[step], one[step], strict=True)):
                # an optimizer step amplifies rounding
                tolerance = max(tolerance, 1e-3 * (update > 0))
                assert ours.keys() == theirs.keys() and theirs["grad_norm"] > 1e-3
                for name in theirs.keys() - left_out:
                    assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=1e-5), (
                        f"{name} of step {step}"
                    )


def test_what_is_trained_on(found: Found) -> None:
    first = {
        case: next(updates[0] for name, updates in found.items() if name.split()[1] == case)
        for case in CASES
    }
    for case in ("dpo", "previous", "initial"):
        assert first[case][0]["loss"] == pytest.approx(math.log(2), abs=1e-6), "at the start"
    assert first["dpo"][0]["pairs"] == 21
    assert len(first["initial"]) == 2
    assert [first[case][0]["rows"] for case in ("previous", "best_of_n")] == [12, 6], (
        "the gate sees these"
    )
    assert all(update["groups/skipped"] == 0 for case in CASES[1:] for update in first[case])
    previous = next(updates for name, updates in found.items() if name.split()[1] == "previous")
    assert all(step[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) for step in previous), (
        "of every round"
    )
    initial = next(updates for name, updates in found.items() if name.split()[1] == "initial")
    assert all(abs(step[0]["loss"] - math.log(2)) > 1e-3 for step in initial[1:])
