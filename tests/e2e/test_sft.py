"""Stage sft on conversations: the held-out loss ends the run, also where it was resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
# a learning rate that soon raises the held-out loss
COMMON = [
    "train.prompts_per_step=8",
    "train.lr=3e-2",
    "train.warmup_steps=0",
    "eval.every=1",
    "checkpoint.every=1",
]


def run(
    folder: Path, name: str, *overrides: str
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The metrics of each step, and the exported weights."""
    command = [
        sys.executable,
        "-m",
        "megarl.cli",
        "train",
        "examples/sft/sft.yaml",
        f"run.dir={folder}",
        f"run.name={name}",
    ]
    done = subprocess.run(
        [*command, *COMMON, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], load_file(
        folder / name / "hf" / "model.safetensors"
    )


def test_a_resumed_run_loses_patience_at_the_same_step(tmp_path: Path) -> None:
    keep = "checkpoint.keep=100"
    rows, weights = run(tmp_path, "whole", "train.steps=40", keep)
    losses = [row["eval/loss"] for row in rows]
    lowest = losses.index(min(losses))
    assert len(losses) == lowest + 1 + 3 < 40, "three evaluations after the lowest"
    assert losses[lowest] < losses[0], "it has learned"
    started = lowest + 2  # one of three is spent
    shutil.copytree(
        tmp_path / "whole/checkpoints" / f"step_{started}",
        tmp_path / f"again/checkpoints/step_{started}",
    )
    again, same = run(tmp_path, "again", "train.steps=40", keep)
    assert [row["step"] for row in again] == list(range(started, len(rows)))
    for key in ("loss", "grad_norm", "eval/loss", "accuracy/sampled"):
        assert [row[key] for row in again] == [row[key] for row in rows[started:]], key
    assert all(torch.equal(weights[name], same[name]) for name in weights)
