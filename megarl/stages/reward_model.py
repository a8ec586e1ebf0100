"""Reward models: a scalar head, trained on preference pairs or on labelled reasoning steps.

    Rankings   Bradley-Terry loss over the pairs of a PreferenceBatch; accuracy: pairs ranked right
    Steps      cross-entropy over the steps of a StepBatch; accuracy: steps classified right

The training loop is in offline.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.objective import loss_weights
from megarl.algorithms.preference import pair_weights, ranked_right
from megarl.algorithms.reward_model import ranking_losses, step_losses
from megarl.data.preferences import preference_batch, step_batch
from megarl.run.context import RankContext
from megarl.run.data import make_prompts
from megarl.run.models import make_trainer
from megarl.stages.evaluation import with_interval
from megarl.stages.offline import open_run, train_measured
from megarl.trainer.heads import RewardHead
from megarl.trainer.trainer import Trainer
from megarl.types import PreferenceBatch, StepBatch, StepReport


def run(rank: RankContext) -> None:
    """Runs stage reward_model on this rank."""
    options = rank.config.reward_model
    kind = "process" if options.process else options.head
    head = RewardHead(kind=kind, aggregate=options.aggregate)
    trainer = make_trainer(rank, head=head)
    if options.process:
        model = Steps(trainer)
        examples = partial(step_batch, rank.tokenizer, separator=options.separator)
    else:
        model = Rankings(trainer, head, options.centre, by_prompt=options.average == "prompts")
        ignore = rank.config.task.ignore_media
        examples = partial(preference_batch, rank.tokenizer, ignore_media=ignore)
    with open_run(rank, trainer, make_prompts(rank)) as run:
        train_measured(rank, run, examples, model.update, partial(held_out_accuracy, model))


@dataclass(frozen=True)
class Rankings:
    """Trains an outcome reward model on preference pairs; `trainer` was built with `head`."""

    trainer: Trainer
    head: RewardHead
    centre: float = 0.0  # coefficient of (better + worse)^2
    by_prompt: bool = False  # True: prompts are weighted equally; False: pairs are

    def update(self, batch: PreferenceBatch) -> StepReport:
        """Trains on one batch; the loss of each update is the mean over its pairs (see
        `by_prompt`).
        """
        return self.trainer.train_on(
            batch,
            partial(ranking_losses, batch, self.head.scores, self.centre),
            partial(pair_weights, by_prompt=self.by_prompt),
        )

    def right(self, batch: PreferenceBatch) -> tuple[Tensor, Tensor]:
        """Returns, for each pair, 1 if it is ranked right (0.5 for a tie, else 0) and its prompt's
        index, both [P].
        """
        scores_N = self.head.scores(self.trainer.forward(batch), batch)
        return ranked_right(scores_N, batch.pairs), batch.group[batch.pairs[:, 0]]


@dataclass(frozen=True)
class Steps:
    """Trains a process reward model on reasoning steps labelled right or wrong."""

    trainer: Trainer

    def update(self, batch: StepBatch) -> StepReport:
        """Trains on one batch; the loss of each update is the mean over its reasoning steps."""
        return self.trainer.train_on(batch, partial(step_losses, batch), loss_weights)

    def right(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """Returns, for each reasoning step, whether it is classified right and its row, both [S]
        for S steps.
        """
        scores_T = self.trainer.forward(batch).values_T
        assert scores_T is not None
        is_right_T = (scores_T > 0) == batch.is_right
        row_T = torch.arange(batch.num_rows).repeat_interleave(batch.lengths_N)
        return is_right_T[batch.mask], row_T[batch.mask]


def held_out_accuracy(model: Rankings | Steps, batch: Any) -> Mapping[str, float]:
    """Returns the number of prompts, and the share of right pairs (or steps) over the whole batch
    with a 95% interval from the per-prompt shares.
    """
    is_right, prompt = model.right(batch)
    share_G = prompt.bincount(is_right.double()) / prompt.bincount()
    samples = max(1, len(is_right) // len(share_G))
    return {
        "size": len(share_G),
        **with_interval("accuracy", share_G.tolist(), samples),
        "accuracy": float(is_right.double().mean()),
    }
