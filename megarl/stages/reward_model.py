"""Reward models: a head of one number, trained on batches of compared responses, or of judged steps (offline.py).

Rankings   Bradley-Terry over the pairs of a PreferenceBatch; accuracy: the share of pairs ranked right
Steps      cross-entropy over the steps of a StepBatch; accuracy: the share of steps judged right
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.objective import loss_weights
from megarl.algorithms.preference import pair_weights
from megarl.algorithms.reward_model import ranked_right, ranking_losses, step_losses
from megarl.stages.evaluation import with_interval
from megarl.trainer.heads import RewardHead
from megarl.trainer.trainer import Trainer
from megarl.types import PreferenceBatch, StepBatch, StepReport


@dataclass(frozen=True)
class Rankings:
    """Trains `trainer`, whose head is `head`, on responses of which some are preferred to others."""

    trainer: Trainer
    head: RewardHead
    centre: float = 0.0  # coefficient of (better + worse)^2
    by_prompt: bool = False  # every prompt counts equally, not every pair

    def update(self, batch: PreferenceBatch) -> StepReport:
        """Makes the updates of one batch: the mean over all pairs of an update, whatever its micro-batches."""
        loss = partial(ranking_losses, batch, self.head.scores, self.centre)
        return self.trainer.train_on(batch, loss, partial(pair_weights, by_prompt=self.by_prompt))

    def right(self, batch: PreferenceBatch) -> tuple[Tensor, Tensor]:
        """([P]: the pair is ranked right, 0.5 for a tie; [P]: its prompt)."""
        scores_N = self.head.scores(self.trainer.forward(batch), batch)
        return ranked_right(scores_N, batch.pairs), batch.group[batch.pairs[:, 0]]


@dataclass(frozen=True)
class Steps:
    """Trains a process reward model on steps of which each is right or wrong."""

    trainer: Trainer

    def update(self, batch: StepBatch) -> StepReport:
        """Makes the updates of one batch: the mean over all steps of an update."""
        return self.trainer.train_on(batch, partial(step_losses, batch), loss_weights)

    def right(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """([steps]: the step is judged right, [steps]: its row)."""
        scores_T, row_T = self.trainer.forward(batch).values_T, torch.arange(batch.num_rows)
        assert scores_T is not None
        row_T = row_T.repeat_interleave(batch.cu_seqlens.diff())
        return ((scores_T > 0) == batch.is_right)[batch.mask], row_T[batch.mask]


def held_out_accuracy(model: Rankings | Steps, batch: Any) -> Mapping[str, float]:
    """Returns the number of prompts, and the share of pairs or steps that are right; its interval is over prompts."""
    is_right, prompt = model.right(batch)
    shares = [float(is_right[prompt == number].double().mean()) for number in prompt.unique()]
    metrics = with_interval("accuracy", shares, max(1, len(is_right) // len(shares)))
    return {"size": len(shares), **metrics, "accuracy": float(is_right.double().mean())}
