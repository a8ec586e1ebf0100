"""Direct preference optimization (DPO, arXiv 2305.18290): one batch of preference pairs per step.

The training loop is in offline.py. The reference is the model before the first step. Its log-prob
of a response is computed once, when the response is first trained on, and checkpointed with the
data position, so a resumed run continues with the same bits.
"""

from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256

import torch
from torch import Tensor

from megarl.algorithms.preference import dpo_losses, pair_weights, ranked_right, response_logprobs
from megarl.config.schema import Dpo
from megarl.data.preferences import preference_batch
from megarl.roles import SpanContext
from megarl.run.context import RankContext
from megarl.run.data import make_prompts
from megarl.run.models import make_trainer
from megarl.stages.evaluation import with_interval
from megarl.stages.offline import open_run, train_measured
from megarl.trainer.reference import FrozenBase, Reference, reference_of
from megarl.trainer.trainer import Trainer
from megarl.types import PreferenceBatch, StepReport


def run(rank: RankContext) -> None:
    """Runs stage dpo on this rank."""
    trainer = make_trainer(rank)
    prompts = make_prompts(rank)
    reference = reference_of(trainer)  # before a checkpoint is restored
    with open_run(rank, trainer, prompts) as run:
        learner = DpoLearner(trainer, reference, rank.config.dpo, prompts.kept, run.telemetry.span)
        ignore = rank.config.task.ignore_media
        examples = partial(preference_batch, rank.tokenizer, ignore_media=ignore)
        train_measured(rank, run, examples, learner.update, learner.accuracy)


@dataclass(frozen=True)
class DpoLearner:
    trainer: Trainer
    reference: Reference | FrozenBase
    options: Dpo
    known: dict[str, float]  # response hash -> log-prob under the reference
    span: SpanContext

    def update(self, batch: PreferenceBatch) -> StepReport:
        """Trains on one batch; the loss of each update is the mean over its pairs.

        Both responses of a pair are always in the same update.
        """
        with self.span("logprobs"):
            reference_N = self.reference_logprobs(batch)
        with self.span("update"):
            losses = partial(dpo_losses, batch, reference_N, self.options)
            report = self.trainer.train_on(batch, losses, pair_weights)
        return replace(report, metrics={**report.metrics, "pairs": len(batch.pairs)})

    def accuracy(self, batch: PreferenceBatch) -> dict[str, float]:
        """Returns held-out metrics: the number of prompts, the mean reward margin, and the accuracy
        (the share of correctly ranked pairs, averaged over prompts) with its 95% interval.
        """
        rewards_N = self.options.beta * (self._logprobs(batch) - self.reference_logprobs(batch))
        margin_P = rewards_N[batch.pairs] @ rewards_N.new_tensor([1, -1])
        group_P = batch.group[batch.pairs[:, 0]]
        share_G = group_P.bincount(ranked_right(rewards_N, batch.pairs)) / group_P.bincount()
        return {
            "size": len(share_G),
            **with_interval("accuracy", share_G.tolist()),
            "rewards/margin": float(margin_P.mean()),
        }

    def reference_logprobs(self, batch: PreferenceBatch) -> Tensor:
        """Returns the reference's log-prob of each response, [N] fp64.

        Runs one forward pass of the reference unless every response is in `known`.
        """
        lengths = batch.lengths_N.tolist()
        rows = torch.stack([batch.tokens, batch.mask.long()]).split(lengths, dim=1)
        keys = [sha256(row.numpy().tobytes()).hexdigest()[:24] for row in rows]
        if not self.known.keys() >= set(keys):
            with self.reference.in_use():
                logprobs = self._logprobs(batch).tolist()
            for key, logprob in zip(keys, logprobs, strict=True):
                self.known.setdefault(key, logprob)
        return torch.tensor([self.known[key] for key in keys], dtype=torch.float64)

    def _logprobs(self, batch: PreferenceBatch) -> Tensor:
        return response_logprobs(
            self.trainer.logprobs(batch),
            batch.mask,
            batch.cu_seqlens,
            average=self.options.averages,
        )
