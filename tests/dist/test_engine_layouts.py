"""Engines with expert and data parallelism: samples, loss and gradients of one rank's engine, and planted faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_layout_ranks import CASES
from start_ranks import run_ranks

pytestmark = pytest.mark.long
RANKS = Path(__file__).with_name("engine_layout_ranks.py")


def rows(folder: Path, case: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / case / "metrics.jsonl").read_text().splitlines()]


def compare(folder: Path, base: str, case: str) -> dict[str, float]:
    """Returns the largest differences of a run from its base, and fails if it is not the same run."""
    differences = {"loss": 0.0, "grad_norm": 0.0}
    for step, (one, other) in enumerate(zip(rows(folder, base), rows(folder, case), strict=True)):
        assert one["rollout/digest"] == other["rollout/digest"], (case, step)
        assert other["weights/verified"] and other["weights/version"] == step + 1
        for key in differences:
            bound = 1e-3 if step else 1e-5
            assert other[key] == pytest.approx(one[key], rel=bound, abs=1e-7), (case, step, key)
            differences[key] = max(differences[key], abs(other[key] / one[key] - 1))
    return differences


def test_data_ranks_sample_what_an_engine_of_one_rank_samples(tmp_path: Path) -> None:
    run_ranks(RANKS, 2, str(tmp_path), "two_base", "two_data_replay")
    compare(tmp_path, "two_base", "two_data_replay")


FAULTS = [
    ("exchanged_experts", r"rank 1: the engine's table puts model\.layers\.0\.mlp\.experts\.2\."),
    ("shifted_map", r"every byte arrived.* cause: layer 0 \(experts\), layer 1 \(experts\)"),
    ("stops_early", r"rank 0 samples, and waited before an engine step for the other data ranks"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_a_fault_of_one_rank_is_found(fault: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        run_ranks(RANKS, 2, str(tmp_path), "fault", fault)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, 4])
def test_every_layout_samples_the_same(world: int, tmp_path: Path) -> None:
    names = [name for name, (processes, _) in CASES.items() if processes == world]
    run_ranks(RANKS, world, str(tmp_path), *names, timeout_s=3000)
    base = names[0]
    for name in names:
        if name.endswith("base"):
            base = name
        print(name, CASES[name][1] or "-", compare(tmp_path, base, name))
