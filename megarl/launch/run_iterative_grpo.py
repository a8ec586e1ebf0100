"""Runs stage iterative_grpo on one rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megarl.checkpoint.state import Further
from megarl.checkpoint.torch_dist import REWARD_MODEL
from megarl.data.preferences import Replay
from megarl.launch.build import Rank, export
from megarl.launch.reward_models import RewardModel
from megarl.launch.run_rl import Learner, make_engine, train_policy
from megarl.rewards.scorer import make_scorer
from megarl.rollout.exchange import Exchange
from megarl.rollout.schedule import Rollouts, has_spread
from megarl.stages.iterative_grpo import RewardModelTraining, iterative_grpo
from megarl.stages.reward_model import Rankings
from megarl.stages.rl import RlRun
from megarl.trainer.actor_critic import ActorCritic
from megarl.trainer.learner import PolicyLearner
from megarl.trainer.reference import Reference


def run_iterative_grpo(rank: Rank) -> None:
    """Runs `megarl train` of stage iterative_grpo on this rank."""
    iterations = Iterations(rank)
    export(rank, train_policy(rank, make_engine, loop=iterations.loop, beside=iterations.beside))


class Iterations:
    """What train_policy does in iterative GRPO: its loop, and what its checkpoints save beside the policy."""

    learner: Learner
    policy: PolicyLearner
    reward_model: RewardModel | None  # if it is trained

    def __init__(self, rank: Rank) -> None:
        self.rank, self.settings = rank, rank.config.iterative
        options = self.settings.reward_model
        self.replay = Replay(options.replay, options.history, rank.config.run.seed)

    def beside(self, learner: Learner, reward_model: RewardModel | None) -> Further:
        self.learner, self.policy = (
            learner,
            learner.actor if isinstance(learner, ActorCritic) else learner,
        )
        self.reward_model = reward_model if self.settings.reward_model.train else None
        reference = None
        if self.settings.reset_reference and self.policy.reference is not None:
            reference = partial(
                self.policy.reference.in_place_of, self.policy.trainer.parameters_by_name().values()
            )
        if self.reward_model is None:
            return Further(reference=reference)
        models = {REWARD_MODEL: self.reward_model.trainer}
        return Further(models, {"replay": self.replay}, self.reward_model.onloaded, reference)

    def loop(self, run: RlRun) -> None:
        iterative_grpo(run, run.steps // self.settings.iterations, self.reset, self._updates(run))

    def reset(self) -> None:
        """The reference becomes the policy, which is then offloaded."""
        if self.settings.reset_reference and isinstance(self.policy.reference, Reference):
            self.policy.reference.reset(self.policy.trainer.parameters_by_name().values())
        for trainer in self.learner.trainers:
            trainer.memory.offload_all()

    def _updates(self, run: RlRun) -> RewardModelTraining | None:
        if self.reward_model is None:
            return None
        config, options, rollouts = self.rank.config, self.settings.reward_model, run.rollouts
        assert isinstance(rollouts, Rollouts) and isinstance(rollouts.generate, Exchange)
        labels = options.labels or tuple(
            reward for reward in config.rewards if reward.name != "model"
        )
        scorer = make_scorer(labels, decode=self.rank.tokenizer.decode, answer=config.task.answer)
        ranked = replace(rollouts.generate, rewards=scorer, score=list)
        return RewardModelTraining(
            Rankings(self.reward_model.trainer, self.reward_model.head, by_prompt=True),
            replace(rollouts, generate=ranked, keep=has_spread, greedy_baseline=False),
            self.replay,
            options,
            run.telemetry.add,
        )
