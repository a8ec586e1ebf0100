"""Supervised fine-tuning: one batch of examples per step, no engine.

Each batch is new, and is scored before it is trained on: exp of an answer's log-prob is the probability of sampling
exactly that answer, so its mean is the sampled accuracy, measured without sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl.algorithms.objective import loss_weights, supervised_loss
from megarl.data.packing import plan_microbatches
from megarl.roles import Checkpoint, Phases, Prompts, Telemetry
from megarl.trainer.trainer import Trainer
from megarl.types import ObjectiveState, Prompt, StepReport, Terminated, TokenBatch


@dataclass
class SftRun:
    """The parts of a run. `start` is the number of steps already done."""

    prompts: Prompts
    examples: Callable[[Sequence[Prompt]], TokenBatch]
    trainer: Trainer
    phases: Phases
    checkpoint: Checkpoint
    telemetry: Telemetry
    state: ObjectiveState
    steps: int
    prompts_per_step: int
    until_accuracy: float | None = None  # stop once the sampled accuracy reaches this
    start: int = 0
    is_stopping: Callable[[], bool] = lambda: False  # the same on every rank


def sft(run: SftRun) -> None:
    for step in range(run.start, run.steps):
        if run.is_stopping():
            raise Terminated("stopped by SIGTERM")
        with run.telemetry.step(step) as record:
            batch = run.examples(run.prompts.take(run.prompts_per_step))
            with run.phases.train():
                with run.telemetry.span("logprobs"):
                    logprobs_T = run.trainer.forward(batch).logprobs_T
                assert logprobs_T is not None
                accuracy = sampled_accuracy(batch, logprobs_T)
                with run.telemetry.span("update"):
                    report = train_supervised(run.trainer, batch)
                is_done = run.until_accuracy is not None and accuracy >= run.until_accuracy
            with run.phases.save():
                run.checkpoint.maybe_save(step + 1, run.state, last=is_done)
            metrics = {**report.metrics, "accuracy/sampled": accuracy}
            record(None, replace(report, metrics=metrics), None)
        if is_done:
            return


def train_supervised(trainer: Trainer, batch: TokenBatch) -> StepReport:
    """Makes the updates of one batch of answers: cross-entropy, averaged over the tokens of each update."""
    plan = plan_microbatches(batch, trainer.layout, trainer.train)
    weights_T = loss_weights(batch, plan)
    updates = tuple(trainer.step(batch, update, supervised_loss, weights_T) for update in plan.updates())
    trainer.finish_batch()
    return StepReport(updates, {"packing/efficiency": plan.efficiency})


def sampled_accuracy(batch: TokenBatch, logprobs_T: Tensor) -> float:
    """Returns the mean probability of sampling exactly the reference answer; 0..1."""
    values_T = torch.where(batch.mask, logprobs_T, 0.0).double()
    until_N = torch.cat([values_T.new_zeros(1), values_T.cumsum(0)])[batch.cu_seqlens]
    return float(until_N.diff().exp().mean())
