"""Stage reward_model by the command line: a resumed run ends with the same bits, and a folder is gone on from."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "train.steps=4",
    "train.prompts_per_step=8",
    "eval.size=16",
    "eval.every=2",
    "checkpoint.every=2",
]


def train(folder: Path, name: str, *overrides: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The exported weights, and the lines of eval.jsonl."""
    command = [
        sys.executable,
        "-m",
        "megarl.cli",
        "train",
        "examples/reward_model/reward_model.yaml",
        f"run.dir={folder}",
    ]
    done = subprocess.run(
        [*command, f"run.name={name}", *SMALL, *overrides],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return load_file(folder / name / "hf" / "model.safetensors"), (
        folder / name / "eval.jsonl"
    ).read_text().splitlines()


@pytest.mark.long
def test_resume_is_bit_equal(tmp_path: Path) -> None:
    whole, evaluations = train(tmp_path, "whole")
    assert [json.loads(line)["step"] for line in evaluations] == [0, 2, 4] and whole[
        "score.weight"
    ].any()
    shutil.copytree(
        tmp_path / "whole" / "checkpoints" / "step_2", tmp_path / "again" / "checkpoints" / "step_2"
    )
    (tmp_path / "again" / "eval.jsonl").write_text(
        "\n".join([*evaluations[:1], '{"step": 2, "accuracy": 0.0}', ""])
    )
    again, repeated = train(tmp_path, "again")
    assert whole.keys() == again.keys() and all(
        torch.equal(whole[name], again[name]) for name in whole
    )
    assert repeated == evaluations, "measured again from the resumed step on"
    folder = f"model.path={tmp_path / 'whole' / 'hf'}"
    _, continued = train(tmp_path, "continued", folder, "model.create=null", "train.steps=0")
    results = [{**json.loads(line), "step": None} for line in (evaluations[-1], continued[-1])]
    assert results[0] == results[1], "the head was loaded with the model"
