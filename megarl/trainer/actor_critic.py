"""The learner of PPO: a policy and a critic, two trainers of one layout that share its process groups.

    score    values V_t of every label, beside the policy's log-probs
    update   the policy's updates (learner.py), then as many of the critic on the same batch, with fixed targets

The objective turns values into advantages and the critic's targets; the loop does not know that there is a critic.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from torch import Tensor

from megarl.algorithms.critic import value_losses, value_metrics
from megarl.algorithms.objective import loss_weights
from megarl.config.schema import Critic
from megarl.roles import Gate
from megarl.trainer.heads import RewardHead, ValueHead
from megarl.trainer.learner import PolicyLearner, batch_plans
from megarl.trainer.trainer import Trainer
from megarl.types import ScoredBatch, StepReport, TokenBatch, TokenScores, TrainBatch, UpdateReport


@dataclass(frozen=True, slots=True)
class CriticHead(ValueHead):
    """Reads a value before each label, and one after the last token of a row, which a bootstrap at a cut needs."""

    def positions(self, batch: TokenBatch) -> Tensor:
        return batch.mask | RewardHead().positions(batch)


@dataclass(frozen=True)
class ActorCritic:
    """roles.Learner. `critic` was built beside the actor's trainer, with a ValueHead or CriticHead."""

    actor: PolicyLearner
    critic: Trainer
    settings: Critic
    span: Callable[[str], AbstractContextManager[Any]] = nullcontext  # times "values" and "critic"

    @property
    def trainers(self) -> list[Trainer]:
        return [self.actor.trainer, self.critic]

    def timed(self, span: Callable[[str], AbstractContextManager[Any]]) -> ActorCritic:
        return replace(self, actor=self.actor.timed(span), span=span)

    def score(self, batch: TrainBatch) -> TokenScores:
        scores = self.actor.score(batch)
        with self.span("values"):
            return replace(scores, values=self.critic.forward(replace(batch, routes=())).values_T)

    def update(self, batch: ScoredBatch, *, gate: Gate | None = None) -> StepReport:
        """Updates both, or in the first `settings.warmup_steps` steps the critic alone. Raises CheckFailed, before
        anything has changed, if `gate` refuses the batch."""
        actor = self.actor.trainer
        is_held = actor.scheduler.step < self.settings.warmup_steps
        report = self._hold(batch, gate) if is_held else self.actor.update(batch, gate=gate)
        actor.memory.offload_training_state()
        with self.span("critic"):
            updates = self._update_critic(batch)
        actor.memory.onload_optimizer()  # a checkpoint may be saved now
        metrics = {
            "value/loss": fmean(update.loss for update in updates),
            "value/grad_norm": fmean(update.grad_norm for update in updates),
            "value/lr": updates[-1].lr,
            "value/clip_frac": fmean(
                update.metrics.get("value/clip_frac", 0.0) for update in updates
            ),
            "value/skipped": sum(update.skipped for update in updates),
        }
        return replace(report, metrics={**report.metrics, **metrics, **value_metrics(batch)})

    def _hold(self, batch: ScoredBatch, gate: Gate | None) -> StepReport:
        """The gate judges the policy as before an update; its schedule advances, so that it counts steps."""
        if gate is not None and batch.old_logprobs is None:
            batch = replace(batch, old_logprobs=self.actor.trainer.logprobs(batch))
        metrics = {} if gate is None else dict(gate(batch))
        self.actor.trainer.finish_batch()
        return StepReport((), metrics)

    def _update_critic(self, batch: ScoredBatch) -> list[UpdateReport]:
        batch = replace(batch, routes=())  # those of the policy
        loss, updates = partial(value_losses, batch, self.settings.clip), list[UpdateReport]()
        for plan in batch_plans(batch, self.critic, self.actor.seed):
            weights_T = loss_weights(batch, plan)
            updates += [self.critic.step(batch, part, loss, weights_T) for part in plan.updates()]
        self.critic.finish_batch()
        return updates
