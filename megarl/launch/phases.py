"""Phases of a step: rollout, train and sync. Each one is timed, records its peak memory, and onloads or offloads
tensors at its boundaries.

    rollout   ends: the engine sleeps
    train     begins: the trainer's weights are onloaded;  ends: its optimizer state and gradients are offloaded
    sync      begins: both sides' weights are onloaded;    ends: the trainer is offloaded, the engine's cache wakes

The first phase is a sync; before it the trainer is offloaded and the engine sleeps (run_rl.train_policy). So the
optimizer state and the engine's cache are never on the device at once. By default nothing is offloaded and nothing
sleeps (train.offload, rollout.sleep_level).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megarl.launch.exit_codes import CurrentPhase
from megarl.platform.device import peak_gb, reset_peak
from megarl.trainer.offload import Memory


class EngineMemory(Protocol):
    """Implemented by megarl.rollout.engine.Engine, whose module imports vLLM."""

    def sleep(self) -> None: ...
    def wake(self, part: str) -> None: ...  # weights | kv_cache


@dataclass(frozen=True)
class TimedPhases:
    """roles.Phases."""

    span: Callable[[str], AbstractContextManager[None]]  # Telemetry.span
    add: Callable[[Mapping[str, float]], None]  # Telemetry.add
    device: torch.device
    trainer: Memory
    engine: EngineMemory | None = None  # None: a stage that samples nothing
    current: CurrentPhase = field(default_factory=CurrentPhase)

    @contextmanager
    def rollout(self) -> Iterator[None]:
        with self._measured("rollout"):
            yield
            if self.engine is not None:
                self.engine.sleep()

    @contextmanager
    def train(self) -> Iterator[None]:
        with self._measured("train"):
            self.trainer.onload_weights()
            yield
            self.trainer.offload_training_state()

    @contextmanager
    def sync(self) -> Iterator[None]:
        with self._measured("sync"):
            self.trainer.onload_weights()
            if self.engine is not None:
                self.engine.wake("weights")
            yield
            self.trainer.offload_all()
            if self.engine is not None:
                self.engine.wake("kv_cache")

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        self.current.name = name
        reset_peak(self.device)
        with self.span(name):
            yield
        self.add({f"memory/{name}/peak_gb": peak_gb(self.device)})
        self.current.name = f"after {name}"  # not reached after an exception, which is attributed to the phase itself
