"""The loop of the stages that sample nothing, such as sft and dpo: one batch of examples per step, no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.roles import Checkpoint, Phases, Prompts, Telemetry
from megarl.types import ObjectiveState, Prompt, StepReport, Terminated


@dataclass
class OfflineRun:
    """The parts of a run. `start` is the number of steps already done."""

    prompts: Prompts
    phases: Phases
    checkpoint: Checkpoint
    telemetry: Telemetry
    state: ObjectiveState
    steps: int
    prompts_per_step: int
    start: int
    is_stopping: Callable[[], bool]  # the same on every rank


def train_offline(
    run: OfflineRun,
    examples: Callable[[Sequence[Prompt]], Any],  # returns the batch that `learn` takes
    learn: Callable[[Any], StepReport],
    *,
    evaluate: Callable[[int], Any] = lambda step: None,
    is_done: Callable[[StepReport], bool] = lambda report: False,
) -> None:
    evaluate(run.start)
    for step in range(run.start, run.steps):
        if run.is_stopping():
            raise Terminated("stopped by SIGTERM")
        with run.telemetry.step(step) as record:
            batch = examples(run.prompts.take(run.prompts_per_step))
            with run.phases.train():
                report = learn(batch)
            with run.phases.save():
                run.checkpoint.maybe_save(step + 1, run.state, last=is_done(report))
            record(None, report, None)
        evaluate(step + 1)
        if is_done(report):
            return
