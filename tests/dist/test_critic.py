"""PPO's two trainers in one process: every layout is one process to rounding, and a resumed run the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from critic_ranks import LAYOUTS, MODELS
from start_ranks import run_ranks

from megarl.commands.random_model import create_model

PROGRAM = Path(__file__).with_name("critic_ranks.py")


@pytest.mark.long
def test_policy_and_critic_in_every_layout(tmp_path: Path) -> None:
    found = {}
    for model in MODELS.values():
        create_model(model, tmp_path)
    for world in (1, 2):
        results = tmp_path / f"{world}.json"
        run_ranks(PROGRAM, world, str(results), str(tmp_path))
        ranks = json.loads(results.read_text())
        for name, case in ranks[0].items():
            found[f"{world} {name}"] = case
            assert all(rank[name]["same"] for rank in ranks), f"{name}: resumed, other bits"
            assert case["again"] == case["numbers"][1], name
            assert all(rank[name]["numbers"] == case["numbers"] for rank in ranks), (
                "every rank reports the same"
            )
    assert len(found) == len(LAYOUTS) + sum(map(len, LAYOUTS.values()))
    for name, case in found.items():
        one = found[f"1 {name.split()[1]} {{}}"]["numbers"]
        assert min(one[0][1], one[0][-4]) > 1e-3, "gradients of both"
        for step, tolerance in ((0, 2e-5), (1, 1e-3)):
            assert case["numbers"][step] == pytest.approx(
                one[step], rel=tolerance, abs=tolerance
            ), f"{name} step {step}"
    dp2 = found["2 dense {}"]
    assert dp2["other"] == pytest.approx(dp2["numbers"][1], rel=1e-4, abs=1e-5), (
        "resumed under tensor parallelism"
    )
