"""Supervised fine-tuning (SFT) on one batch of examples per step; the loop is in offline.py.

Each batch is scored before the model trains on it. The exponential of an answer's log-prob is the
probability of sampling exactly that answer, so its mean is the accuracy under sampling, measured
without sampling.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import torch
from torch import Tensor

from megarl.algorithms.objective import loss_weights, supervised_loss
from megarl.data.collate import supervised_batch
from megarl.run.context import RankContext
from megarl.run.data import make_prompts
from megarl.run.models import make_trainer
from megarl.stages.offline import OfflineRun, held_out, open_run, train_offline
from megarl.trainer.trainer import Trainer
from megarl.types import StepReport, TokenBatch


def run(rank: RankContext) -> None:
    """Runs stage sft on this rank."""
    options = rank.config.sft
    trainer = make_trainer(rank)
    examples = partial(supervised_batch, rank.tokenizer)
    with open_run(rank, trainer, make_prompts(rank)) as run:
        sft = Sft(
            run,
            trainer,
            held_out(rank, examples),
            eval_every=rank.config.eval.every,
            until_accuracy=options.until_accuracy or inf,
            patience=options.patience or inf,
        )
        train_offline(run, examples, sft.learn, is_done=sft.is_done)


@dataclass
class Sft:
    """Trains on reference answers, and evaluates the loss on held-out ones before a save.

    `run.state.held_out` is (lowest loss, evaluations since), for early stopping.
    """

    run: OfflineRun
    trainer: Trainer
    held_out: Callable[[], TokenBatch]  # returns the same examples on every call
    eval_every: int = 0  # steps between evaluations; also at the last step; 0: never
    until_accuracy: float = inf  # stop once the sampled accuracy reaches this
    patience: float = inf  # stop after this many evaluations without a lower held-out loss

    def __post_init__(self) -> None:
        self._step = self.run.start
        if self.run.state.held_out[1] >= self.patience:  # the resumed run had already stopped
            self.run.steps = self.run.start

    def learn(self, batch: TokenBatch) -> StepReport:
        with self.run.telemetry.span("logprobs"):
            accuracy = sampled_accuracy(batch, self.trainer.logprobs(batch))
        with self.run.telemetry.span("update"):
            report = train_supervised(self.trainer, batch)
        report = replace(report, metrics={**report.metrics, "accuracy/sampled": accuracy})
        self._step += 1
        if not self.eval_every:
            return report
        is_due = self._step % self.eval_every == 0 or self._step == self.run.steps
        if not (is_due or self.is_done(report)):
            return report
        loss = mean_loss(self.trainer, self.held_out())
        lowest, since = self.run.state.held_out
        best = (lowest, since + 1)
        if loss < lowest:
            best = (loss, 0)
        self.run.state = replace(self.run.state, held_out=best)
        return replace(report, metrics={**report.metrics, "eval/loss": loss})

    def is_done(self, report: StepReport) -> bool:
        has_accuracy = report.metrics["accuracy/sampled"] >= self.until_accuracy
        return has_accuracy or self.run.state.held_out[1] >= self.patience


def mean_loss(trainer: Trainer, batch: TokenBatch) -> float:
    """Returns the mean cross-entropy per learned token, in nats."""
    return -float(trainer.logprobs(batch)[batch.mask].double().mean())


def train_supervised(trainer: Trainer, batch: TokenBatch) -> StepReport:
    """Trains on one batch; the loss of each update is its mean cross-entropy per learned token."""
    return trainer.train_on(batch, supervised_loss, loss_weights)


def sampled_accuracy(batch: TokenBatch, logprobs_T: Tensor) -> float:
    """Returns the mean probability of sampling exactly the reference answer, in [0, 1].

    Rows without learned tokens are left out; NaN if there are no others.
    """

    def sums_N(values_T: Tensor) -> Tensor:
        return torch.cat([values_T.new_zeros(1), values_T.cumsum(0)])[batch.cu_seqlens].diff()

    logprobs_N = sums_N(torch.where(batch.mask, logprobs_T, 0.0).double())
    return float(logprobs_N.exp()[sums_N(batch.mask.long()) > 0].mean())
