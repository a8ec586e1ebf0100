"""The PPO learner: a policy and a critic, two trainers of one layout that share process groups.

    score    values V_t of every label, and the policy's log-probs
    update   the policy's updates (learner.py), then equally many of the critic, with fixed targets

The objective computes advantages and the critic's targets from the values. The RL loop does not
need to know that there is a critic.
"""

from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from torch import Tensor

from megarl.algorithms.critic import value_losses, value_metrics
from megarl.algorithms.objective import loss_weights
from megarl.config.schema import Critic
from megarl.roles import Gate
from megarl.trainer.heads import RewardHead, ValueHead
from megarl.trainer.learner import PolicyLearner, batch_plans
from megarl.trainer.trainer import Trainer
from megarl.types import ScoredBatch, StepReport, TokenBatch, TokenScores, TrainBatch


class CriticHead(ValueHead):
    """A value head that reads the trained positions and the last position of each row.

    The value at the last position bootstraps the return of a response that was cut by length.
    """

    def positions(self, batch: TokenBatch) -> Tensor:
        return batch.mask | RewardHead().positions(batch)


@dataclass(frozen=True)
class ActorCritic:
    """roles.Learner of PPO: updates the policy, then the critic.

    `critic` shares process groups with the actor's trainer; its head is a ValueHead or a
    CriticHead. The actor's `span` also times "values" and "critic".
    """

    actor: PolicyLearner
    critic: Trainer
    settings: Critic

    @property
    def trainers(self) -> list[Trainer]:
        return [self.actor.trainer, self.critic]

    def score(self, batch: TrainBatch) -> TokenScores:
        scores = self.actor.score(batch)
        with self.actor.span("values"):
            return replace(scores, old_values=self.critic.forward(batch).values_T)

    def update(self, batch: ScoredBatch, *, gate: Gate = lambda batch: {}) -> StepReport:
        """Updates policy and critic; in the first `settings.warmup_steps` steps, only the critic.

        Raises CheckFailed, before anything has changed, if `gate` refuses the batch.
        """
        actor = self.actor.trainer
        if actor.scheduler.step < self.settings.warmup_steps:
            report = self._hold(batch, gate)
        else:
            report = self.actor.update(batch, gate=gate)
        actor.memory.offload_training_state()
        loss = partial(value_losses, batch, self.settings.clip)
        plans = batch_plans(batch, self.critic, self.actor.seed)
        with self.actor.span("critic"):
            updates = self.critic.train_on(batch, loss, loss_weights, plans).updates
        actor.memory.onload_optimizer()  # a checkpoint may be saved next
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

    def _hold(self, batch: ScoredBatch, gate: Gate) -> StepReport:
        """Runs the gate and advances the policy's learning-rate schedule, without an update."""
        metrics = gate(self.actor.prepare(batch))
        self.actor.trainer.finish_batch()
        return StepReport((), metrics)


Learner = PolicyLearner | ActorCritic


def policy_of(learner: Learner) -> PolicyLearner:
    return learner.actor if isinstance(learner, ActorCritic) else learner
