"""The roles the loop knows. A backend is whatever fits one of these; the loop never asks which.

In colocated mode every rank calls every method, in the same order, and gets the same answer (SPMD).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from megarl.types import (
    Group,
    LogProbs,
    MicrobatchPlan,
    ObjectiveState,
    Prompt,
    PublishReport,
    Sample,
    ScoredBatch,
    StepReport,
    TrainBatch,
)

__all__ = [
    "Actor",
    "Checkpoint",
    "Checks",
    "Evaluation",
    "Phases",
    "Prompts",
    "Request",
    "Rewards",
    "Rollouts",
    "Sampler",
    "Telemetry",
    "Weights",
]


class Request(Protocol):
    """One sample to draw: `index` is which of the prompt's samples, `seed` fixes its random stream."""

    prompt: Prompt
    index: int
    seed: int
    temperature: float  # 0: greedy


class Prompts(Protocol):
    """A resumable stream of prompts, the same on every rank."""

    def take(self, count: int) -> list[Prompt]: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


class Sampler(Protocol):
    """The policy as it samples: the engine replica of this rank."""

    def sample(self, requests: Sequence[Request], *, version: int) -> list[Sample]: ...


class Rewards(Protocol):
    """Scores samples; never raises. A sample that cannot be scored comes back with reward None."""

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]: ...


class Rollouts(Protocol):
    """Prompts in, scored groups out: generates, scores, filters, refills; the same groups on every rank."""

    def collect(self, prompts: Prompts, count: int, *, version: int) -> list[Group]: ...


class Actor(Protocol):
    """The policy as it is trained."""

    def logprobs(self, batch: TrainBatch) -> LogProbs: ...
    def update(self, batch: ScoredBatch, plan: MicrobatchPlan) -> StepReport: ...


class Weights(Protocol):
    """Moves the actor's weights into the engine, verified."""

    def publish(self, *, version: int) -> PublishReport: ...


class Checks(Protocol):
    """Refuses to go on (CheckFailed) when trainer and engine do not agree."""

    def parity(self, batch: TrainBatch, logprobs: LogProbs) -> None: ...


class Phases(Protocol):
    """Who owns the device now. On CPU and in split mode the phases are only timed."""

    def rollout(self) -> AbstractContextManager[None]: ...
    def train(self) -> AbstractContextManager[None]: ...
    def sync(self) -> AbstractContextManager[None]: ...


class Checkpoint(Protocol):
    """Saves after `step` rollout batches, when it is time to; `last`: there will be no further step."""

    def maybe_save(self, step: int, state: ObjectiveState, *, last: bool = False) -> None: ...


class Evaluation(Protocol):
    """Measures the policy on held-out problems after `step` steps, when it is time to."""

    def maybe_run(self, step: int) -> Mapping[str, Any] | None: ...


class Telemetry(Protocol):
    """One line of metrics a step, and a bar for whoever watches."""

    def step(self, step: int) -> AbstractContextManager[None]: ...
    def log(self, step: int, groups: Sequence[Group], report: StepReport) -> None: ...
    def record(self, metrics: Mapping[str, Any]) -> None: ...
