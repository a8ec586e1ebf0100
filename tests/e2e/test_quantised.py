"""Quantised models are trained as they are published, exported in their own format, and sampled by the engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_folders import by_transformers, make_quantised, read_all, stored

from megarl.checkpoint.hf_folder import HfFolder
from megarl.commands.conversion import run_convert
from megarl.layout import Parallel

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]


def train(config: str, folder: Path, runs: Path, *overrides: str) -> str:
    values = [
        "model.create=null",
        f"model.path={folder}",
        f"run.dir={runs}",
        "run.name=run",
        "train.steps=1",
    ]
    values += [
        "train.lr=3e-2",
        "train.warmup_steps=0",
        "train.prompts_per_step=8",
        "train.dtype=bf16",
        "eval.every=0",
    ]
    command = [sys.executable, "-m", "megarl.cli", "train", config, *values, *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


OTHERS = [
    pytest.param(kind, marks=pytest.mark.exhaustive)
    for kind in ("deepseek_v3-int4", "gpt_oss-mxfp4")
]


@pytest.mark.parametrize("kind", ["deepseek_v3-fp8", *OTHERS])
def test_trained_one_step_and_exported_in_its_own_format(tmp_path: Path, kind: str) -> None:
    """What the export's readers see is the trained weight, rounded once. Two ranks cut blocks."""
    folder, fmt, parts = make_quantised(kind, tmp_path)
    layout = "parallel={tensor: 2, expert: 2}"
    train(
        "examples/sft/sft.yaml",
        folder,
        tmp_path,
        layout,
        "sft.patience=null",
        "checkpoint={every: 1, export_hf: end, export_format: same}",
    )
    exported, trained = tmp_path / "run/hf", tmp_path / "trained"
    options: dict[str, Any] = {"config": folder, "file_bytes": 1 << 30, "interactive": False}
    run_convert(tmp_path / "run/checkpoints/step_1", trained, "hf", Parallel(), **options)
    before, after, weights = stored(folder), stored(exported), stored(trained)
    assert {name: (x.dtype, x.shape) for name, x in after.items()} == {
        name: (x.dtype, x.shape) for name, x in before.items()
    }
    storage, changed = HfFolder(folder).export_storage(), 0
    for name, tensor in read_all(exported).items():
        exact = torch.stack(
            [storage.round(matrix) for matrix in weights[name].view(-1, *tensor.shape[-2:])]
        )
        assert torch.equal(tensor, exact.view_as(tensor)), name
        changed += not torch.equal(
            after[name + fmt.values].view(torch.uint8), parts[name][fmt.values].view(torch.uint8)
        )
    assert changed == len(parts), "a step at this learning rate changes elements of every tensor"
    if kind != "deepseek_v3-fp8":  # which has partial blocks
        theirs = by_transformers(kind, exported)
        assert all(
            torch.equal(tensor, theirs[name].view_as(tensor))
            for name, tensor in read_all(exported).items()
        )


@pytest.mark.exhaustive
def test_the_engine_samples_a_quantised_model(tmp_path: Path) -> None:
    folder, *_ = make_quantised("qwen3_moe-fp8", tmp_path)
    train(
        "configs/tiny_moe.yaml",
        folder,
        tmp_path,
        "checkpoint.every=0",
        "checkpoint.export_hf=never",
    )
    assert '"weights/verified": true' in (tmp_path / "run/metrics.jsonl").read_text()
