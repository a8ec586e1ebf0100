"""The engine's routes in the trainer's layouts: planted ones move log-probs without replay, and not with it.

One launch holds all layouts of a world: starting engines is what costs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from start_ranks import run_ranks

RANKS = Path(__file__).with_name("route_ranks.py")
TWO = [
    {"pipeline": 2},  # several micro-batches in flight
    {"pipeline": 2, "virtual_pipeline": 2},
    {"tensor": 2, "expert": 2},
    {"context": 2},
]
FOUR = [
    {"pipeline": 4},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"context": 4},
    {"tensor": 2, "expert": 2},
    {"tensor": 2, "expert": 4},
    {"tensor": 2, "expert_tensor": 2, "pipeline": 2},
    {"tensor": 2, "context": 2},
    {"pipeline": 2, "context": 2, "expert": 2},
]


def launch(folder: Path, world: int, layouts: list[dict[str, int]]) -> dict[str, Any]:
    run_ranks(RANKS, world, str(folder), *map(json.dumps, layouts))
    found = json.loads((folder / "found.json").read_text())
    for layout, each in found["layouts"].items():
        print(
            f"{layout}: mean difference {each['without']:.3f} without replay, {each['replayed']:.1e} with it; "
            f"updates, then with full and selective recomputation, {', '.join(f'{x:.1e}' for x in each['update'])}; "
            f"gradient norms {', '.join(f'{x:.7g}' for x in each['grad_norms'])}; "
            f"{each['routing/differs']:.2%} of (token, layer) pairs differ; {each['micro-batches']} micro-batches"
        )
    print({name: value for name, value in found.items() if name != "layouts"})
    return found


def check(found: dict[str, Any], layouts: list[dict[str, int]]) -> None:
    norms = []
    assert len(found["layouts"]) == len(layouts)
    for each in found["layouts"].values():
        assert each["without"] > 0.05
        assert max(each["replayed"], *each["update"]) < 1e-5
        assert 0.05 < each["routing/differs"] < 0.3 and each["routing/missing"] == 0
        assert each["recorded"] < 1e-5 and each["recorded differs"] == {
            "routing/differs": 0.0,
            "routing/missing": 0.0,
        }
        assert each["micro-batches"] > 1
        norms += each["grad_norms"]
    assert max(norms) - min(norms) < 1e-4 * max(norms), (
        "of the same routes in every layout and recomputation"
    )
    assert found["cached"][1] >= 4 * 96, "whole blocks of the long prompt"
    for name in ("probe", "planted probe"):  # replayed, it agrees
        assert all(statistic < limit for statistic, limit in found[name]), found[name]
    assert "routes of 1 (row, layer) pairs changed" in found["changed"]
    assert "cause: routing: the engine chose other experts for" in found["verdict"]
    assert found["gate"]["logprob_diff/mean"] < 1e-5


@pytest.mark.long
def test_two_ranks(tmp_path: Path) -> None:
    check(launch(tmp_path, 2, TWO), TWO)


@pytest.mark.long
@pytest.mark.exhaustive
def test_eight_layouts_on_four_ranks(tmp_path: Path) -> None:
    check(launch(tmp_path, 4, FOUR), FOUR)
