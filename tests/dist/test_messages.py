"""A sync sends what `megarl plan --messages` prints, message by message: colocated and split, on 4 and 8 ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from start_ranks import run_ranks

from megarl.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"
RANKS = Path(__file__).with_name("message_ranks.py")
SMALL = ["sync.round_bytes=16384", "model.create.layers=4"]
DENSE, EXPERTS = str(CONFIGS / "tiny_dense.yaml"), str(CONFIGS / "tiny_moe.yaml")


def colocated(world: int, nodes: tuple[int, ...]) -> dict[str, list[str]]:
    """Trainer and engines on the same ranks, all on one node and posing as several."""
    cases = {}
    for per_node in (world, *nodes):
        common = [*SMALL, f"launch.processes={world}", f"launch.processes_per_node={per_node}"]
        dense = ["parallel.tensor=2", "parallel.pipeline=2", "rollout.tensor=1"]
        experts = [
            "parallel.tensor=2",
            "parallel.expert=2",
            f"parallel.pipeline={world // 4}",
            "rollout.tensor=2",
        ]
        cases[f"dense, nodes of {per_node}"] = [DENSE, *common, *dense]
        cases[f"experts, nodes of {per_node}"] = [EXPERTS, *common, *experts]
    return cases


def split(world: int) -> dict[str, list[str]]:
    """The first half sends, the other half receives; with several ranks per node, and nodes that do both."""
    half, cases = world // 2, {}
    for per_node in (2, world):
        common = [
            *SMALL,
            "launch.topology=split",
            f"launch.processes={half}",
            f"launch.processes_per_node={per_node}",
        ]
        dense = [f"parallel.pipeline={half}", "rollout.tensor=2", f"rollout.replicas={half // 2}"]
        experts = ["parallel.expert=2", f"rollout.tensor={half}", "rollout.replicas=1"]
        cases[f"dense, split, nodes of {per_node}"] = [DENSE, *common, *dense]
        cases[f"experts, split, nodes of {per_node}"] = [EXPERTS, *common, *experts]
    return cases


@pytest.mark.parametrize(
    ("world", "nodes"),
    [(4, (2,)), pytest.param(8, (2, 4), marks=[pytest.mark.long, pytest.mark.exhaustive])],
    ids=["4 ranks", "8 ranks"],
)
def test_messages_sent_are_those_printed(tmp_path, world, nodes):
    cases = colocated(world, nodes) | split(world)
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    run_ranks(RANKS, world, str(tmp_path))
    seen = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(world)]
    for name, arguments in cases.items():
        printed = tmp_path / "messages.jsonl"
        assert (
            main(["plan", arguments[0], "--weights", "--messages", str(printed), *arguments[1:]])
            == 0
        )
        messages = [json.loads(line) for line in printed.read_text().splitlines()]
        assert messages, name
        for side in ("sent", "received"):
            assert sorted(message for rank in seen for message in rank[name][side]) == sorted(
                messages
            ), (name, side)
        assert not any(rank[name]["wrong"] for rank in seen), name
        if "split" in name:
            half = world // 2
            assert {m[1] // half for m in messages if m[0] == 0} == {0}, "trainers send first"
            assert {m[2] // half for m in messages} == {1}, "engines alone receive"
