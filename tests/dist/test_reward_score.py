"""A reward model scores the samples of a step as transformers does, in every layout, and leaves the device again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reward_score_ranks import LAYOUTS
from start_ranks import run_ranks

pytestmark = pytest.mark.long


def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    run_ranks(
        Path(__file__).parent / "reward_score_ranks.py",
        2,
        str(tmp_path),
        str(tmp_path / "results.json"),
    )
    found = json.loads((tmp_path / "results.json").read_text())
    expected = found["transformers"]
    assert max(expected) - min(expected) > 0.5, "nothing to compare"
    for layout in LAYOUTS:
        scores = [(reward - 0.25) / 2 for reward in found[layout]["rewards"]]
        assert scores == pytest.approx(expected, abs=1e-5), layout
        assert (
            found[layout]["engine"] == ["sleep", "weights", "kv_cache"]
            and not found[layout]["bytes_left"]
        )
