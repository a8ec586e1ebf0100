"""The stages with the real engine: they learn, resume with the same bits, and do in every layout what one rank does.

Stage sft is in test_sft.py, iterative_grpo's phases are in test_iterative.py, and a teacher's in test_algorithms.py.
"""

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
from stage_ranks import IN_LAYOUTS, LAYOUTS, RESUMED
from start_ranks import run_ranks

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_dpo_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """In the second pass over the data, where the reference's log-probs are those of the first pass."""

    def train(name: str) -> dict[str, torch.Tensor]:
        values = [
            f"run.dir={tmp_path}",
            f"run.name={name}",
            "task.options={vocab: 67, responses: 3, size: 24}",
        ]
        values += [
            "train.steps=6",
            "train.prompts_per_step=8",
            "model.create.hidden=32",
            "checkpoint.every=4",
        ]
        values += ["checkpoint.export_hf=end", "eval={every: 3, size: 8}"]
        command = [sys.executable, "-m", "megarl.cli", "train", "examples/dpo/dpo.yaml", *values]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        return load_file(tmp_path / name / "hf" / "model.safetensors")

    whole = train("whole")
    shutil.copytree(
        tmp_path / "whole" / "checkpoints" / "step_4", tmp_path / "again" / "checkpoints" / "step_4"
    )
    again = train("again")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    rows, resumed = metrics(tmp_path / "whole"), metrics(tmp_path / "again")
    names = ("loss", "grad_norm", "rewards/margin", "rewards/accuracy", "logprobs/chosen")
    assert [[row[name] for name in names] for row in resumed] == [
        [row[name] for name in names] for row in rows[4:]
    ]
    assert (
        rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
        and rows[5]["loss"] < rows[0]["loss"]
    )
    evaluated = [
        json.loads(line) for line in (tmp_path / "whole" / "eval.jsonl").read_text().splitlines()
    ]
    assert [(row["step"], row["size"]) for row in evaluated] == [(0, 8), (3, 8), (6, 8)]
    assert evaluated[0]["rewards/margin"] == 0 and evaluated[2]["rewards/margin"] > 0


PROGRAM = Path(__file__).parent / "stage_ranks.py"


def every_run(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {file.parent.name: metrics(file.parent) for file in folder.glob("*/metrics.jsonl")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    run_ranks(PROGRAM, 1, str(folder), timeout_s=570)
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return every_run(folder)


@pytest.fixture(
    scope="module", params=["once", pytest.param("every", marks=pytest.mark.exhaustive)]
)
def in_layouts(folder: Path, request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    run_ranks(PROGRAM, 2, str(folder), request.param, timeout_s=570)
    return every_run(folder)


def test_sampled_preferences_are_learned_under_the_parity_gate(
    runs: dict[str, list[dict[str, Any]]],
) -> None:
    for name, updates, samples in (("previous", 1, 32), ("initial", 2, 32), ("best_of_n", 1, 64)):
        rows = runs[name]
        assert all(row["updates"] == updates and row["weights/verified"] for row in rows)
        assert all(row["logprob_diff/max"] < 1e-4 and row["grad_norm"] > 1e-3 for row in rows), (
            "the gate compared them"
        )
        assert all(row["samples/count"] == samples and row["groups/skipped"] == 0 for row in rows)
    assert [row["loss"] for row in runs["previous"]] == [pytest.approx(math.log(2), abs=1e-6)] * 4
    assert runs["initial"][3]["rewards/margin"] > runs["initial"][0]["rewards/margin"]
    assert "rewards/margin" not in runs["best_of_n"][0]


def test_prompts_without_spread_are_skipped_and_counted(
    runs: dict[str, list[dict[str, Any]]],
) -> None:
    for row in runs["flat"]:
        assert (row["groups/skipped"], row["update/skipped"], row["loss"]) == (4, 1, None)


@pytest.mark.parametrize("name", ["best_of_n", "ppo"])
def test_the_reward_rises(runs: dict[str, list[dict[str, Any]]], name: str) -> None:
    rewards = [row["reward/mean"] for row in runs[name]]
    print(name, [round(reward, 3) for reward in rewards])
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


def test_ppo_updates_its_critic_first(runs: dict[str, list[dict[str, Any]]]) -> None:
    assert [row["updates"] for row in runs["ppo"]] == [0, 0] + [2] * 8
    assert all(row["value/loss"] > 0 and row["logprob_diff/max"] < 1e-4 for row in runs["ppo"])


def test_judged_steps_are_learned(runs: dict[str, list[dict[str, Any]]]) -> None:
    losses = [row["loss"] for row in runs["judge"]]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5) and min(losses) < 0.6


@pytest.mark.parametrize("name", RESUMED)
def test_they_resume_with_the_same_bits(runs: dict[str, list[dict[str, Any]]], name: str) -> None:
    whole, resumed = runs[name], runs[f"{name}_resumed"]
    half = len(whole) // 2
    assert [row["step"] for row in resumed] == list(range(half, 2 * half))
    for key in (
        "rollout/digest",
        "loss",
        "grad_norm",
        "reward/mean",
        "value/loss",
        "value/explained_variance",
    ):
        assert [row.get(key) for row in resumed] == [row.get(key) for row in whole[half:]], key


@pytest.mark.parametrize("name", IN_LAYOUTS)
def test_every_layout_is_one_process(
    in_layouts: dict[str, list[dict[str, Any]]], name: str
) -> None:
    """At step 1 where rounding has not changed a sampled token, as it does once in a while."""
    one, same_samples = in_layouts[f"{name}.one"], 0
    keys = {"loss", "grad_norm", "reward/mean", "kl/ref", "kl/teacher", "value/loss", "value/grad_norm", "value/mean",
            "rewards/margin", "reward_model/loss", "reward_model/accuracy", "eval/loss"} & set(one[0])  # fmt: skip
    assert len(one) == 2 and one[0]["grad_norm"] > 1e-3
    layouts = [layout for layout in LAYOUTS if f"{name}.{layout}" in in_layouts]
    for layout in layouts:
        for step, tolerance in ((0, 1e-5), (1, 1e-3)):
            here, there = in_layouts[f"{name}.{layout}"][step], one[step]
            is_same = here.get("rollout/digest") == there.get("rollout/digest")
            assert is_same or step, layout
            same_samples += is_same
            for key in keys if is_same else ():
                if there[key] is None:  # without rewards
                    assert here[key] is None, f"{layout} step {step} {key}"
                    continue
                expected = pytest.approx(there[key], rel=tolerance, abs=1e-5)
                assert here[key] == expected, f"{layout} step {step} {key}"
    assert layouts and same_samples >= 2 * len(layouts) - 1
