"""Who owns the device now: rollout, train or sync. Each is timed, its peak of memory told, and what it needs moved.

    train | trainer rests: gradients freed, optimizer to the host
    sync  | the engine's weights awake, then published; the trainer's weights to the host; the engine's cache awake
    rollout | the engine asleep; the trainer's weights back

So the optimizer and the engine's cache are never on the device together. What rests and sleeps is the config's choice
(train.offload, rollout.sleep_level); by default, and between CPU neighbours, all stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from megarl.launch.current import enter
from megarl.platform.device import peak_gb, reset_peak

__all__ = ["Resting", "Sleeping", "TimedPhases"]


class Resting(Protocol):
    """The trainer's memory (megarl.trainer.offload.Memory)."""

    def rest(self) -> None: ...  # nothing trains now; the weights stay
    def leave(self) -> None: ...  # nor are the weights read
    def wake(self) -> None: ...


class Sleeping(Protocol):
    """The engine's memory (megarl.rollout.engine.Engine)."""

    def sleep(self) -> None: ...
    def wake(self, part: str) -> None: ...  # weights | kv_cache


@dataclass(frozen=True)
class TimedPhases:
    """roles.Phases. `span` times a named stretch (Telemetry.span), `record` is Telemetry.record."""

    span: Callable[[str], AbstractContextManager[None]]
    record: Callable[[Mapping[str, float]], None]
    device: torch.device
    trainer: Resting
    engine: Sleeping | None = None  # None: a stage that samples nothing

    @contextmanager
    def rollout(self) -> Iterator[None]:
        with self._measured("rollout"):
            yield
            if self.engine is not None:
                self.engine.sleep()

    @contextmanager
    def train(self) -> Iterator[None]:
        with self._measured("train"):
            self.trainer.wake()
            yield
            self.trainer.rest()

    @contextmanager
    def sync(self) -> Iterator[None]:
        with self._measured("sync"):
            if self.engine is not None:
                self.engine.wake("weights")
            yield
            self.trainer.leave()
            if self.engine is not None:
                self.engine.wake("kv_cache")

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        enter(name)
        reset_peak(self.device)
        with self.span(name):
            yield
        self.record({f"memory/{name}/peak_gb": peak_gb(self.device)})
        enter(f"after {name}")  # not reached when an exception leaves: then it is still in the phase itself
