"""A run that is stopped and started again ends with the same weights, bit for bit; in another layout, to rounding."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.commands.random_model import create_model
from megarl.config.schema import Create
from megarl.telemetry.audit import audit

ROOT = Path(__file__).resolve().parents[2]
LAYERS = "model.create.layers=2"
SMALL = [
    "train.prompts_per_step=8",
    "train.warmup_steps=1",
    "train.schedule=cosine",
    "checkpoint.every=2",
    "launch.processes=1",  # two are stopped and resumed in test_stops.py
]


def sums(folder: Path) -> list[str]:
    """The quickstart's task, from a file: reasoning-gym takes seconds to import."""
    rows = [
        {"prompt": f"Calculate {a} + {b}.", "answer": str(a + b)}
        for a in range(10, 30)
        for b in range(10, 30)
    ]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [f"task.name=jsonl:{folder}/sums.jsonl", "task.options={}"]


def run_sft(
    folder: Path, name: str, steps: int, *overrides: str, model: str = LAYERS
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "megarl.cli",
        "train",
        "configs/quickstart_sft.yaml",
        f"run.dir={folder}",
    ]
    command += [
        f"run.name={name}",
        f"train.steps={steps}",
        model,
        *SMALL,
        *sums(folder.parent),
        *overrides,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def sft(folder: Path, name: str, steps: int, *overrides: str) -> dict[str, torch.Tensor]:
    """The exported weights after `steps` steps."""
    done = run_sft(folder, name, steps, *overrides)
    assert done.returncode == 0, done.stderr
    return load_file(folder / name / "hf" / "model.safetensors")


def losses(folder: Path, name: str = "loss") -> dict[int, float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row[name] for row in map(json.loads, lines)}


@pytest.mark.long
def test_resume(tmp_path: Path, make_disk: Callable[[str], Path]) -> None:
    tmp_path /= "runs"
    tmp_path.mkdir()
    # which must not change what is trained
    whole = sft(tmp_path, "whole", 4, "checkpoint.export_hf=2")
    halfway, last = (
        load_file(tmp_path / "whole" / f"hf_step_{step}" / "model.safetensors") for step in (2, 4)
    )
    assert all(torch.equal(whole[name], last[name]) for name in whole)
    assert not all(torch.equal(whole[name], halfway[name]) for name in whole)
    assert len(list((tmp_path / "whole").glob("hf*"))) == 3
    assert min(losses(tmp_path / "whole", "memory/train/peak_gb").values()) > 0.1, (
        "each phase reports its peak"
    )
    # as if it had been stopped after its second checkpoint's step
    shutil.copytree(
        tmp_path / "whole" / "checkpoints" / "step_2", tmp_path / "again" / "checkpoints" / "step_2"
    )

    again = sft(tmp_path, "again", 4)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert losses(tmp_path / "again") == {
        s: v for s, v in losses(tmp_path / "whole").items() if s >= 2
    }

    refused = run_sft(tmp_path, "again", 6, "train.lr=1e-2")
    assert (refused.returncode, refused.stderr.count("\n")) == (
        2,
        1,
    ) and "train.lr 0.002 -> 0.01" in refused.stderr
    assert "lr: 0.002\n" in (tmp_path / "again" / "config.yaml").read_text()

    small = make_disk("100m")
    shutil.copytree(
        tmp_path / "whole" / "checkpoints" / "step_2", small / "full" / "checkpoints" / "step_2"
    )
    room = sum(file.stat().st_size for file in (small / "full").rglob("*") if file.is_file()) // 2
    (small / ".models").symlink_to(tmp_path / ".models")
    filler = small / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small).free - room))
    full = run_sft(small, "full", 4, "checkpoint.export_hf=never")
    assert full.returncode == 3, full.stderr
    message, *rest = full.stderr.splitlines()
    assert f"the disk of {small}" in message and "is full" in message and not rest
    assert json.loads((small / "full" / "exit.json").read_text())["code"] == 3
    assert [path.name for path in (small / "full" / "checkpoints").iterdir()] == ["step_2"]
    filler.unlink()
    resumed = sft(small, "full", 4)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.long
def test_a_weight_that_is_not_a_number_is_blamed_on_the_weights(tmp_path: Path) -> None:
    model = create_model(Create(layers=1, hidden=32), tmp_path)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    done = run_sft(tmp_path / "runs", "nan", 2, model=f"model.path={model}")
    assert (done.returncode, done.stderr.count("\n")) == (3, 1), done.stderr
    assert (
        "weights are not finite: NaN or infinity in decoder.layers.0.mlp.linear_fc2.weight"
        in done.stderr
    )


def kill(folder: Path, kills: int, *values: str) -> None:
    """With -9, wherever it is: the launcher or a rank, most often while a checkpoint is being written."""
    common = ["checkpoint.every=1", "train.prompts_per_step=8", "model.create.layers=2"]
    common += ["train.warmup_steps=2", "train.schedule=cosine"]
    command = [
        sys.executable,
        "tests/e2e/kills.py",
        str(folder),
        "5",
        str(kills),
        "configs/quickstart_sft.yaml",
    ]
    command += [*common, *sums(folder), *values]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit-identical: True" in done.stdout and done.stdout.count("kill ") == kills
    assert "too late" not in done.stdout, done.stdout


@pytest.mark.long
@pytest.mark.exhaustive  # in the split topology it is tried each time (test_split.py)
def test_every_prompt_is_accounted_for_after_kills(tmp_path: Path) -> None:
    """Groups without spread are filtered, others carried over; the metrics are those of a run that was left alone."""
    overrides = [
        "train.steps=10",
        "train.prompts_per_step=4",
        "rollout.samples_per_prompt=2",
        "checkpoint.every=2",
    ]
    overrides += ["algorithm.filter_zero_std=true"]
    command = [
        sys.executable,
        "tests/e2e/kills.py",
        str(tmp_path),
        "11",
        "2",
        "configs/tiny_dense.yaml",
        *overrides,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("prompts taken") == 3 and "3 starts" in done.stdout
    whole, killed = (
        losses(tmp_path / "whole", "rollout/digest"),
        losses(tmp_path / "killed", "rollout/digest"),
    )
    assert all(whole[step] == digest for step, digest in killed.items()) and len(killed) > 2
    old, new = (audit(tmp_path / name) for name in ("whole", "killed"))
    assert (old.states, old.steps) == (new.states, new.steps)
    ledger = tmp_path / "killed" / "ledger.jsonl"
    lines = [line for line in ledger.read_text().splitlines() if '"settled", "step": 0' not in line]
    ledger.write_text("\n".join(lines))
    assert "were never settled" in audit(tmp_path / "killed").problems[0]


@pytest.mark.long
@pytest.mark.exhaustive
def test_killed_once(tmp_path: Path) -> None:
    kill(tmp_path, 1, "parallel.tensor=2", "train.steps=6")


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_killed_five_times(tmp_path: Path) -> None:
    kill(
        tmp_path,
        5,
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "launch.processes=4",
        "train.steps=24",
    )
