"""Peaks of phases and of their parts, on a device whose statistics are scripted: GB, as torch counts them."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.processes.exit_codes import CurrentPhase
from megarl.run import phases as module
from megarl.run.phases import TimedPhases


@dataclass
class Gpu:
    """torch counts what sleeps as allocated."""

    allocated: float = 48.0  # the engine: 15 of weights, 33 of cache
    peak: float = 48.0
    calls: list[str] = field(default_factory=list)
    bytes_asleep: int = 0

    def use(self, gb: float) -> None:
        self.allocated += gb
        self.peak = max(self.peak, self.allocated)

    def reset(self, _device: torch.device) -> None:
        self.peak = self.allocated

    def sleep(self) -> None:
        self.bytes_asleep = 48 * 10**9

    def wake(self, part: str) -> None:
        self.bytes_asleep -= (15 if part == "weights" else 33) * 10**9

    def __getattr__(self, name: str) -> Any:
        return lambda: self.calls.append(name)  # of the trainer's memory


def phases_on(gpu: Gpu, found: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> TimedPhases:
    monkeypatch.setattr(module, "peak_gb", lambda _: gpu.peak)
    monkeypatch.setattr(module, "reset_peak", gpu.reset)
    trainer: Any = SimpleNamespace(memory=gpu)
    telemetry: Any = SimpleNamespace(span=nullcontext, add=found.update)
    return TimedPhases(telemetry, torch.device("cpu"), [trainer], gpu, CurrentPhase())


def test_a_sleeping_engine_does_not_count_and_parts_count_for_their_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, found = Gpu(), dict[str, float]()
    phases = phases_on(gpu, found, monkeypatch)
    with phases.rollout():
        with phases.part("exchange"):
            gpu.use(2)
            gpu.use(-2)
        gpu.use(1)
        gpu.use(-1)
    with phases.train():
        gpu.use(9)
        with phases.part("logprobs"):
            gpu.use(3)
            gpu.use(-3)
        with phases.part("update"):
            gpu.use(60)
            gpu.use(-15)
    with phases.save():
        gpu.use(4)
        gpu.use(-49)
    with phases.sync():
        with phases.part("staging"):
            gpu.use(5)
            gpu.use(-5)
        gpu.use(-9)
    assert {name.split("/")[1]: gb for name, gb in found.items()} == {
        "exchange": 50, "rollout": 50, "logprobs": 12, "update": 69, "train": 69, "save": 58, "staging": 29, "sync": 48,
    }  # fmt: skip
    assert gpu.calls == [
        "onload_weights",
        "free_gradients",
        "offload_training_state",
        "onload_weights",
        "offload_all",
    ]


def test_an_unknown_peak_stays_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, found = Gpu(peak=math.nan), dict[str, float]()
    gpu.reset = lambda _: None  # type: ignore[method-assign]
    phases = phases_on(gpu, found, monkeypatch)
    with phases.rollout(), phases.part("exchange"):
        pass
    assert len(found) == 2 and all(map(math.isnan, found.values()))
