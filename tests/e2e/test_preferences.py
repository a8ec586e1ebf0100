"""The stages dpo, iterative_dpo and best_of_n as a user runs them, and resumed with the same bits."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from start_ranks import run_ranks

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_dpo_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """In the second pass over the data, where the reference's log-probs are those of the first pass."""

    def train(name: str) -> dict[str, torch.Tensor]:
        values = [f"run.dir={tmp_path}", f"run.name={name}", "task.options={vocab: 67, responses: 3, size: 24}"]
        values += ["train.steps=6", "train.prompts_per_step=8", "model.create.hidden=32", "checkpoint.every=4"]
        values += ["checkpoint.export_hf=end", "eval={every: 3, size: 8}"]
        command = [sys.executable, "-m", "megarl.cli", "train", "configs/dpo.yaml", *values]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        return load_file(tmp_path / name / "hf" / "model.safetensors")

    whole = train("whole")
    shutil.copytree(tmp_path / "whole" / "checkpoints" / "step_4", tmp_path / "again" / "checkpoints" / "step_4")
    again = train("again")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    rows, resumed = metrics(tmp_path / "whole"), metrics(tmp_path / "again")
    names = ("loss", "grad_norm", "rewards/margin", "rewards/accuracy", "logprobs/chosen")
    assert [[row[name] for name in names] for row in resumed] == [[row[name] for name in names] for row in rows[4:]]
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and rows[5]["loss"] < rows[0]["loss"]
    evaluated = [json.loads(line) for line in (tmp_path / "whole" / "eval.jsonl").read_text().splitlines()]
    assert [(row["step"], row["size"]) for row in evaluated] == [(0, 8), (3, 8), (6, 8)]
    assert evaluated[0]["rewards/margin"] == 0 and evaluated[2]["rewards/margin"] > 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("preferences")
    run_ranks(Path(__file__).parent / "preference_ranks.py", 1, str(folder), timeout_s=570)
    return {file.parent.name: metrics(file.parent) for file in folder.glob("*/metrics.jsonl")}


def test_sampled_preferences_are_learned_under_the_parity_gate(runs: dict[str, list[dict[str, Any]]]) -> None:
    for name, updates in (("previous", 1), ("initial", 2), ("best_of_n", 1)):
        rows = runs[name]
        assert len(rows) == 4 and all(row["updates"] == updates and row["weights/verified"] for row in rows)
        assert all(row["logprob_diff/max"] < 1e-4 and row["grad_norm"] > 1e-3 for row in rows), "the gate compared them"
        assert all(row["samples/count"] == 32 and row["groups/skipped"] == 0 for row in rows)
    assert [row["loss"] for row in runs["previous"]] == [pytest.approx(math.log(2), abs=1e-6)] * 4
    assert runs["initial"][3]["rewards/margin"] > runs["initial"][0]["rewards/margin"]
    assert "rewards/margin" not in runs["best_of_n"][0]


def test_prompts_without_spread_are_skipped_and_counted(runs: dict[str, list[dict[str, Any]]]) -> None:
    for row in runs["flat"]:
        assert (row["groups/skipped"], row["update/skipped"], row["loss"]) == (4, 1, 0)


@pytest.mark.parametrize("name", ["initial", "best_of_n"])
def test_they_resume_with_the_same_bits(runs: dict[str, list[dict[str, Any]]], name: str) -> None:
    whole, resumed = runs[name], runs[f"{name}_resumed"]
    assert [row["step"] for row in resumed] == [2, 3]
    for key in ("rollout/digest", "loss", "grad_norm", "reward/mean"):
        assert [row[key] for row in resumed] == [row[key] for row in whole[2:]], key
