"""What needs a task's or a reward's code is asked before a process starts, for the command that is given."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megarl.config.load import parse_config
from megarl.config.schema import Config
from megarl.launch.preflight import preflight
from megarl.platform.env import Env

ALONE = Env()


@pytest.fixture
def task(tmp_path: Path) -> dict[str, Any]:
    for name, prompt in (("train", "1+1="), ("eval", "2+2=")):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "{prompt}", "answer": "2"}}\n')
    return {"name": f"jsonl:{tmp_path}/train.jsonl", "options": {"eval_file": f"{tmp_path}/eval.jsonl"}}


def made(task: dict[str, Any], create: dict[str, Any] | None = None, **sections: Any) -> Config:
    return parse_config({"model": {"create": create or {}}, "task": task, **sections})


@pytest.mark.parametrize(
    ("create", "sections", "says"),
    [
        ({"head_dim": 16}, {}, "head_dim=16, but vLLM's attention on CPU supports"),
        ({}, {"rewards": [{"name": "acuracy"}]}, "did you mean accuracy"),
        ({}, {"rewards": []}, "rewards is empty"),
    ],
)
def test_eval_after_sft_needs_an_engine_and_rewards(
    task: dict[str, Any], create: dict[str, Any], sections: dict[str, Any], says: str
) -> None:
    config = made(task, create, stage="sft", **sections)
    assert preflight(config, ALONE), "SFT itself needs neither"
    with pytest.raises(ValueError, match=re.escape(says)):
        preflight(config, ALONE, command="eval")


def test_problems_are_held_out_where_they_are_asked_for(task: dict[str, Any]) -> None:
    assert preflight(made(task, eval={"every": 1}), ALONE)
    assert preflight(made(task), ALONE, command="eval")
    only = {"name": task["name"]}
    assert preflight(made(only), ALONE)
    assert preflight(made(only, eval={"every": 1}, stage="sft"), ALONE), "SFT never evaluates"
    with pytest.raises(ValueError, match=re.escape("set task.options.eval_file=FILE")):
        preflight(made(only, eval={"every": 1}), ALONE)
    with pytest.raises(ValueError, match=re.escape("set task.options.eval_file=FILE")):
        preflight(made(only), ALONE, command="eval")


def test_trackers_are_checked_for_the_runs_that_use_them(task: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.telemetry.trackers.is_installed", lambda package: False)
    config = made(task, telemetry={"tensorboard": True})
    with pytest.raises(ValueError, match=re.escape("telemetry.tensorboard=true needs the package tensorboard")):
        preflight(config, ALONE)
    assert preflight(config, ALONE, command="eval"), "it has no metrics"
    assert preflight(config, Env(rank=1, world_size=2), command="train"), "rank 0 writes"
