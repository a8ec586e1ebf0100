"""Bytes on the device at the peak of each phase, under one choice of train.recompute and train.offload, on one rank.

python memory_peaks.py [SETTING ...]      a model of 46M parameters; one process each, one JSON line each, peaks in MB

A CPU stands for a GPU and its host: what is copied to "cpu" counts as on the host, what lies on "cpu:0" as on the
device. Every storage that an operator makes is counted for as long as it lives, whoever holds it. `resident` is what
`memory/<phase>/peak_gb` says of the same process: there the host is the same memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer_cases import random_batch

from megarl.config.schema import Create, Train
from megarl.launch.phases import TimedPhases
from megarl.launch.random_model import create_model
from megarl.layout import Layout, Parallel
from megarl.models.registry import read_model
from megarl.stages.sft import train_supervised
from megarl.trainer.trainer import Trainer

DEVICE = torch.device("cpu", 0)
LARGE = {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 4, "vocab": 32_000, "tokenizer": "none"}
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "recompute core_attn": {"recompute": "selective", "recompute_modules": ["core_attn"]},
    "recompute mlp": {"recompute": "selective", "recompute_modules": ["mlp"]},
    "recompute core_attn, mlp": {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "recompute full": {"recompute": "full"},
    "offload gradients": {"offload": ["gradients"]},
    "offload optimizer": {"offload": ["optimizer"]},
    "offload weights": {"offload": ["weights"]},
    "offload all": {"offload": ["gradients", "optimizer", "weights"]},
    "offload all, recompute full": {"offload": ["gradients", "optimizer", "weights"], "recompute": "full"},
}
Peaks = dict[str, float]  # of each phase


class Device(TorchDispatchMode):
    """Counts the storages that live on the device."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        found = func(*args, **given)
        to_host = func is torch.ops.aten._to_copy.default and given.get("device") == torch.device("cpu")
        if not to_host:
            for tensor in tree_leaves(found):
                if isinstance(tensor, Tensor):
                    self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self.bytes())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._live or self._live[key]() is None:
            self._live[key] = weakref.ref(storage)

    def bytes(self) -> int:
        """Storages may have been resized, so all are asked."""
        live = [(key, ref()) for key, ref in self._live.items()]
        self._live = {key: self._live[key] for key, storage in live if storage is not None}
        return sum(storage.nbytes() for _, storage in live if storage is not None)


def build(
    folder: Path, create: Mapping[str, Any], train: Mapping[str, Any], *, device: torch.device = DEVICE
) -> Trainer:
    model, settings = create_model(Create(**create), folder), Train.model_validate({"lr": 1e-3, **train})
    return Trainer.build(read_model(model), Layout.of(Parallel(), 1, 0), train=settings, folder=model, device=device)


def peaks(
    folder: Path, create: Mapping[str, Any], train: Mapping[str, Any], *, rows: int, longest: int
) -> tuple[Peaks, Peaks]:
    """(counted bytes, resident bytes) of each phase in the second step, when all that is lazy exists."""
    counted: Peaks = {}
    resident: Peaks = {}

    @contextmanager
    def span(name: str) -> Iterator[None]:
        device.peak = device.bytes()
        yield
        counted[name] = max(device.peak, device.bytes())

    def add(metrics: Mapping[str, float]) -> None:
        resident.update({name.split("/")[1]: 1e9 * value for name, value in metrics.items()})

    with Device() as device:
        trainer = build(folder, create, train)
        phases = TimedPhases(span, add, DEVICE, trainer.memory)
        batch = random_batch(num_rows=rows, longest=longest)
        for _ in range(2):
            with phases.rollout():
                pass
            with phases.train():
                trainer.forward(batch)
                train_supervised(trainer, batch)
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
    print(json.dumps({"setting": setting} | {k: {n: round(v / 1e6) for n, v in p.items()} for k, p in said.items()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        for one in sys.argv[1:] or SETTINGS:
            subprocess.run([sys.executable, "-W", "ignore", __file__, one], check=True)
