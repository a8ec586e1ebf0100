"""Direct preference optimization on one batch of compared responses per step (arXiv 2305.18290; the loop: offline.py).

The reference is the model before the first step. Its log-prob of a response is computed once, when the response is
first trained on, and saved with the position in the data: a resumed run continues with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256

import torch
from torch import Tensor

from megarl.algorithms.preference import dpo_losses, pair_weights, response_logprobs
from megarl.config.section import Dpo
from megarl.stages.evaluation import with_interval
from megarl.trainer.reference import FrozenBase, Reference
from megarl.trainer.trainer import Trainer
from megarl.types import PreferenceBatch, StepReport


@dataclass(frozen=True)
class DpoLearner:
    trainer: Trainer
    reference: Reference | FrozenBase
    options: Dpo
    known: dict[str, float]  # log-probs under the reference, by response
    span: Callable[[str], AbstractContextManager[None]]

    def update(self, batch: PreferenceBatch) -> StepReport:
        """Makes the updates of one batch: the mean over the pairs of each update. A pair is never split."""
        with self.span("logprobs"):
            reference_N = self.reference_logprobs(batch)
        with self.span("update"):
            report = self.trainer.train_on(
                batch, partial(dpo_losses, batch, reference_N, self.options), pair_weights
            )
        return replace(report, metrics={**report.metrics, "pairs": len(batch.pairs)})

    def accuracy(self, batch: PreferenceBatch) -> dict[str, float]:
        """Returns, as the mean over prompts, the share of pairs with the higher reward for the better response."""
        rewards_N = self.options.beta * (self._logprobs(batch) - self.reference_logprobs(batch))
        margin_P, group_P = (
            rewards_N[batch.pairs] @ rewards_N.new_tensor([1, -1]),
            batch.group[batch.pairs[:, 0]],
        )
        share_G = group_P.bincount((margin_P.sign() + 1) / 2) / group_P.bincount()
        metrics = with_interval("accuracy", share_G.tolist())
        return {"size": len(share_G), **metrics, "rewards/margin": float(margin_P.mean())}

    def reference_logprobs(self, batch: PreferenceBatch) -> Tensor:
        """[N] fp64. One forward pass of the reference, unless every response is known."""
        lengths, is_learned = batch.cu_seqlens.diff().tolist(), batch.mask.long()
        rows = zip(batch.tokens.split(lengths), is_learned.split(lengths), strict=True)
        keys = [sha256(torch.cat(row).numpy().tobytes()).hexdigest()[:24] for row in rows]
        if not self.known.keys() >= set(keys):
            with self.reference.in_place_of(self.trainer.parameters_by_name().values()):
                for key, logprob in zip(keys, self._logprobs(batch).tolist(), strict=True):
                    self.known.setdefault(key, logprob)
        return torch.tensor([self.known[key] for key in keys], dtype=torch.float64)

    def _logprobs(self, batch: PreferenceBatch) -> Tensor:
        logprobs_T = self.trainer.logprobs(batch)
        return response_logprobs(
            logprobs_T, batch.mask, batch.cu_seqlens, average=self.options.averages
        )
