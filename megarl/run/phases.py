"""Phases of a step: onload and offload tensors, and record time and peak memory.

    phase     begins with                    ends with
    rollout                                  engine: sleep
    train     trainer: onload weights
    save      trainer: free gradients        trainer: offload optimizer state
    sync      both: onload weights           trainer: offload all; engine: wake the KV cache

The first phase is a sync. Before it, the trainer is offloaded and the engine sleeps (stages/rl.py),
so the optimizer state and the KV cache are never on the device at the same time; nor are the KV
cache and the weights that the trainer offloads, even in a probe (`engine_turn`). By default,
nothing is offloaded and the engine does not sleep (train.offload, rollout.sleep_level). Peak memory
is also recorded for parts of a phase, for example "exchange" and "staging".
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megarl.platform.device import peak_gb, reset_peak
from megarl.processes.exit_codes import CurrentPhase
from megarl.roles import Telemetry
from megarl.rollout.vllm.engine import Engine
from megarl.trainer.trainer import Trainer


@dataclass(frozen=True)
class TimedPhases:
    """Implements roles.Phases."""

    telemetry: Telemetry
    device: torch.device
    trainers: Sequence[Trainer]
    engine: Engine | None  # None in stages without rollouts
    current: CurrentPhase
    _peaks: list[float] = field(default_factory=list)  # peak GB so far, per open phase or part

    def __post_init__(self) -> None:
        if self.engine is not None:
            self.engine.turn = self.engine_turn

    @contextmanager
    def rollout(self) -> Iterator[None]:
        with self._phase("rollout"):
            yield
            self._settle()
            if self.engine is not None:
                self.engine.sleep()

    @contextmanager
    def train(self) -> Iterator[None]:
        with self._phase("train"):
            for trainer in self.trainers:
                trainer.memory.onload_weights()
            yield

    @contextmanager
    def save(self) -> Iterator[None]:
        with self._phase("save"):
            for trainer in self.trainers:
                trainer.memory.free_gradients()
            yield
            for trainer in self.trainers:
                trainer.memory.offload_training_state()

    @contextmanager
    def sync(self) -> Iterator[None]:
        with self._phase("sync"):
            for trainer in self.trainers:
                trainer.memory.onload_weights()
            self._settle()
            if self.engine is not None:
                self.engine.wake("weights")
            yield
            for trainer in self.trainers:
                trainer.memory.offload_all()
            self._settle()
            if self.engine is not None:
                self.engine.wake("kv_cache")

    @contextmanager
    def engine_turn(self) -> Iterator[None]:
        """Context of a probe: the engine computes without the trainers' weights on the device.

        On exit, its KV cache is freed and the policy's weights are onloaded, for the trainer.
        """
        for trainer in self.trainers:
            trainer.memory.offload_all()
        self._settle()
        yield
        self._settle()
        if self.engine is not None:
            self.engine.free_cache()
        self.trainers[0].memory.onload_weights()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Records the time and the peak memory of a part of a phase."""
        self._settle()
        self._peaks.append(0.0)
        with self.telemetry.span(name):
            yield
        self._settle()
        self.telemetry.add({f"memory/{name}/peak_gb": self._peaks.pop()})

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.current.name = name
        with self.part(name):
            yield
        # skipped after an exception, so that the failure is attributed to the phase
        self.current.name = f"after {name}"

    def _settle(self) -> None:
        """Updates the peaks of all open phases and parts with the peak since the last call.

        Must be called before a phase or part begins or ends, and before the engine sleeps or wakes.
        """
        peak = peak_gb(self.device)
        if self.engine is not None:
            peak -= self.engine.bytes_asleep / 1e9
        self._peaks[:] = [max(peak, other) for other in self._peaks]  # peak first: NaN propagates
        reset_peak(self.device)
