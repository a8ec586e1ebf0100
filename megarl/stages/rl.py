"""The RL loop: sample with the engine, score, update, publish. It uses roles, never a backend.

The same function runs on every rank of a colocated job and in the controller of a split one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megarl.algorithms.objective import Objective
from megarl.roles import (
    Checkpoint,
    Checks,
    Evaluation,
    Learner,
    Phases,
    Prompts,
    Rollouts,
    Telemetry,
    Weights,
)
from megarl.types import Group, ObjectiveState, TrainBatch


@dataclass
class RlRun:
    """The parts of a run. `start` is the number of steps already done."""

    prompts: Prompts
    rollouts: Rollouts
    collate: Callable[[Sequence[Group]], TrainBatch]
    learner: Learner
    objective: Objective
    weights: Weights
    evaluation: Evaluation
    checks: Checks
    phases: Phases
    checkpoint: Checkpoint
    telemetry: Telemetry
    state: ObjectiveState
    steps: int
    prompts_per_step: int
    start: int = 0


def train(run: RlRun) -> None:
    with run.phases.sync():
        run.weights.publish(version=run.start)  # a broken transport fails now, not after step 1
    run.evaluation.maybe_run(run.start)
    for step in range(run.start, run.steps):
        with run.telemetry.step(step) as record:
            with run.phases.rollout():
                rollout = run.rollouts.collect(run.prompts, run.prompts_per_step, version=step)
            batch = run.collate(rollout.groups)
            with run.phases.train():
                scores = run.learner.score(batch)  # what the objective needs before the update
                scored, run.state = run.objective.advantages(batch, scores, run.state)
                update = run.learner.update(
                    scored, gate=run.checks.parity
                )  # acts before the first optimizer step
                run.state = run.objective.after_updates(scored, update, run.state)
                run.rollouts.trained(step, update)
            with run.phases.save():
                run.checkpoint.maybe_save(step + 1, run.state)
            with run.phases.sync():
                sync = run.weights.publish(version=step + 1)
            record(rollout, update, sync, scored)
        run.evaluation.maybe_run(step + 1)
