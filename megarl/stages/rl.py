"""The loop: sample with the engine, score, weigh, update, publish. One screen; it knows roles, never a backend.

The same function runs on every rank of a colocated job and in the controller of a split one.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.algorithms.objective import add_advantages
from megarl.config.schema import Config
from megarl.data.collate import collate
from megarl.data.packing import plan_microbatches
from megarl.layout import Layout
from megarl.roles import Actor, Checkpoint, Checks, Evaluation, Phases, Prompts, Rollouts, Telemetry, Weights
from megarl.types import ObjectiveState

__all__ = ["RlRun", "train"]


@dataclass
class RlRun:
    """All that a run is made of. `start` is the number of steps already done."""

    config: Config
    layout: Layout
    prompts: Prompts
    rollouts: Rollouts
    actor: Actor
    weights: Weights
    evaluation: Evaluation
    checks: Checks
    phases: Phases
    checkpoint: Checkpoint
    telemetry: Telemetry
    state: ObjectiveState
    start: int = 0


def train(run: RlRun) -> None:
    config = run.config
    mask_truncated = config.algorithm.truncated == "mask"
    with run.phases.sync():
        run.weights.publish(version=run.start)  # a broken transport fails now, not after step 1
    run.evaluation.maybe_run(run.start)
    for step in range(run.start, config.train.steps):
        with run.telemetry.step(step):
            with run.phases.rollout():
                groups = run.rollouts.collect(run.prompts, config.train.prompts_per_step, version=step)
            batch = collate(groups, temperature=config.rollout.temperature, mask_truncated=mask_truncated)
            with run.phases.train():
                logprobs = run.actor.logprobs(batch)  # old; and reference when the objective has a KL term
                run.checks.parity(batch, logprobs)  # trainer against engine, on the tokens just sampled
                scored, run.state = add_advantages(batch, logprobs, config.algorithm, run.state)
                report = run.actor.update(scored, plan_microbatches(scored, run.layout, config.train))
                run.checkpoint.maybe_save(step + 1, run.state)
            with run.phases.sync():
                run.weights.publish(version=step + 1)
            run.telemetry.log(step, groups, report)
        run.evaluation.maybe_run(step + 1)
