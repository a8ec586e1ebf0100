"""Bytes on the device at the peak of each phase, under one choice of train.recompute and train.offload, on one rank.

python memory_peaks.py [SETTING ...]      a model of 46M parameters; one process each, one JSON line each, peaks in MB

A CPU stands for a GPU and its host (benchmarks.memory_phases.Device). `resident` is what `memory/<phase>/peak_gb` says
of the same process: there the host is the same memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from trainer_cases import random_batch

from benchmarks.memory_phases import DEVICE, Device
from megarl.commands.random_model import create_model
from megarl.config.schema import Create, Train
from megarl.layout import Layout, Parallel
from megarl.models.registry import read_model
from megarl.processes.exit_codes import CurrentPhase
from megarl.run.phases import TimedPhases
from megarl.stages.sft import train_supervised
from megarl.trainer.trainer import Trainer

LARGE = {
    "layers": 8,
    "hidden": 512,
    "heads": 8,
    "kv_heads": 4,
    "vocab": 32_000,
    "tokenizer": "none",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "recompute core_attn": {"recompute": "selective", "recompute_modules": ["core_attn"]},
    "recompute mlp": {"recompute": "selective", "recompute_modules": ["mlp"]},
    "recompute core_attn, mlp": {
        "recompute": "selective",
        "recompute_modules": ["core_attn", "mlp"],
    },
    "recompute full": {"recompute": "full"},
    "offload gradients": {"offload": ["gradients"]},
    "offload optimizer": {"offload": ["optimizer"]},
    "offload weights": {"offload": ["weights"]},
    "offload all": {"offload": ["gradients", "optimizer", "weights"]},
    "offload all, recompute full": {
        "offload": ["gradients", "optimizer", "weights"],
        "recompute": "full",
    },
}
Peaks = dict[str, float]  # of each phase


def build(
    folder: Path,
    create: Mapping[str, Any],
    train: Mapping[str, Any],
    *,
    device: torch.device = DEVICE,
) -> Trainer:
    model, settings = (
        create_model(Create(**create), folder),
        Train.model_validate({"lr": 1e-3, **train}),
    )
    return Trainer.build(
        read_model(model), Layout.of(Parallel(), 1, 0), train=settings, folder=model, device=device
    )


def peaks(
    folder: Path, create: Mapping[str, Any], train: Mapping[str, Any], *, rows: int, longest: int
) -> tuple[Peaks, Peaks]:
    """(counted bytes, resident bytes) of each phase in the second step, when all that is lazy exists."""
    counted: Peaks = {}
    resident: Peaks = {}
    device = Device()

    @contextmanager
    def span(name: str) -> Iterator[None]:
        counted.pop(name, None)
        with device.peak(name, counted):
            yield

    def add(metrics: Mapping[str, float]) -> None:
        resident.update({name.split("/")[1]: 1e9 * value for name, value in metrics.items()})

    with device.with_host():
        trainer = build(folder, create, train)
        phases = TimedPhases(
            SimpleNamespace(span=span, add=add), DEVICE, [trainer], None, CurrentPhase()
        )
        batch = random_batch(num_rows=rows, longest=longest)
        for _ in range(2):
            with phases.rollout():
                pass
            with phases.train():
                trainer.forward(batch)
                train_supervised(trainer, batch)
            with phases.save(), phases.part("inner"):
                pass
            with phases.sync():
                pass
    return counted, resident


def main(setting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train = {"dtype": "fp32", "max_tokens_per_microbatch": 1024, **SETTINGS[setting]}
    with TemporaryDirectory() as folder:
        counted, resident = peaks(Path(folder), LARGE, train, rows=4, longest=512)
    said = {"counted": counted, "resident": resident}
    print(
        json.dumps(
            {"setting": setting}
            | {k: {n: round(v / 1e6) for n, v in p.items()} for k, p in said.items()}
        )
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        for one in sys.argv[1:] or SETTINGS:
            subprocess.run([sys.executable, "-W", "ignore", __file__, one], check=True)
