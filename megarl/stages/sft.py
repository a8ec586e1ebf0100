"""Supervised fine-tuning on one batch of examples per step (offline.py).

Each batch is new, and is scored before it is trained on: exp of an answer's log-prob is the probability of sampling
exactly that answer, so its mean is the sampled accuracy, measured without sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from megarl.algorithms.objective import loss_weights, supervised_loss
from megarl.stages.offline import OfflineRun
from megarl.trainer.trainer import Trainer
from megarl.types import StepReport, TokenBatch


@dataclass
class Sft:
    """Learns answers, and measures the loss on held-out ones, `run.state.held_out`, before the step is saved."""

    run: OfflineRun
    trainer: Trainer
    held_out: Callable[[], TokenBatch]  # examples to evaluate on, the same each time
    eval_every: int = 0  # steps, and at the end; 0: never
    until_accuracy: float | None = None  # stop once the sampled accuracy reaches this
    patience: float = inf  # stop after as many evaluations without a lower held-out loss

    def __post_init__(self) -> None:
        self._step = self.run.start
        if self.run.state.held_out[1] >= self.patience:  # a finished run was resumed
            self.run.steps = self.run.start

    def learn(self, batch: TokenBatch) -> StepReport:
        with self.run.telemetry.span("logprobs"):
            accuracy = sampled_accuracy(batch, self.trainer.logprobs(batch))
        with self.run.telemetry.span("update"):
            report = train_supervised(self.trainer, batch)
        report = replace(report, metrics={**report.metrics, "accuracy/sampled": accuracy})
        self._step += 1
        is_last = self.is_done(report) or self._step == self.run.steps
        if not self.eval_every or not (is_last or self._step % self.eval_every == 0):
            return report
        loss, (lowest, since) = mean_loss(self.trainer, self.held_out()), self.run.state.held_out
        self.run.state = replace(
            self.run.state, held_out=(loss, 0) if loss < lowest else (lowest, since + 1)
        )
        return replace(report, metrics={**report.metrics, "eval/loss": loss})

    def is_done(self, report: StepReport) -> bool:
        is_learned = (
            self.until_accuracy is not None
            and report.metrics["accuracy/sampled"] >= self.until_accuracy
        )
        return is_learned or self.run.state.held_out[1] >= self.patience


def mean_loss(trainer: Trainer, batch: TokenBatch) -> float:
    """Returns the cross-entropy of a learned token, in nats."""
    return -float(trainer.logprobs(batch)[batch.mask].double().mean())


def train_supervised(trainer: Trainer, batch: TokenBatch) -> StepReport:
    """Makes the updates of one batch of answers: cross-entropy, averaged over the tokens of each update."""
    return trainer.train_on(batch, supervised_loss, loss_weights)


def sampled_accuracy(batch: TokenBatch, logprobs_T: Tensor) -> float:
    """Returns the mean probability of sampling exactly the reference answer; 0..1."""
    values_T = torch.where(batch.mask, logprobs_T, 0.0).double()
    until_N = torch.cat([values_T.new_zeros(1), values_T.cumsum(0)])[batch.cu_seqlens]
    return float(until_N.diff().exp().mean())
