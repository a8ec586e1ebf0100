"""Iterative GRPO: reference and reward model follow the policy (arXiv 2402.03300, algorithm 1).

    an iteration   the policy samples; the label rewards rank its samples
                   reference    <- policy, bit for bit
                   reward model <- new rankings, mixed with a share of earlier ones (replay)
                   stages/rl.train: `steps` steps of the policy against both

The reference and the reward model are updated at the start of an iteration, at a multiple of
`steps`. A run that resumes at such a step repeats these updates from the checkpoint that `hold`
wrote. A run that resumes within an iteration uses the reference and the reward model of its
checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from megarl.checkpoint.state import Further
from megarl.checkpoint.torch_dist import REWARD_MODEL
from megarl.config.schema import RewardModelUpdates
from megarl.data.preferences import History, Ranking, ranking_batch, rankings
from megarl.rewards.scorer import make_scorer
from megarl.roles import Prompts, Rollouts
from megarl.rollout import schedule
from megarl.rollout.exchange import Exchange
from megarl.run.checkpoints import export
from megarl.run.context import RankContext
from megarl.run.models import RewardModel
from megarl.stages.reward_model import Rankings
from megarl.stages.rl import RlRun, train, train_policy
from megarl.trainer.actor_critic import Learner, policy_of
from megarl.trainer.reference import Reference


def run(rank: RankContext) -> None:
    """Runs stage iterative_grpo on this rank."""
    iterations = Iterations(rank)
    export(rank, train_policy(rank, loop=iterations.loop, further=iterations.further))


@dataclass(frozen=True)
class RewardModelTraining:
    """Trains the reward model on rankings of the policy's samples."""

    model: Rankings
    rollouts: Rollouts  # scored by the label rewards
    history: History
    options: RewardModelUpdates
    add: Callable[[Mapping[str, float]], None]  # Telemetry.add

    def sample(self, prompts: Prompts, step: int) -> list[Ranking]:
        rollout = self.rollouts.collect(prompts, self.options.prompts, version=step)
        self.rollouts.trained(step, by="reward_model")
        return rankings(rollout.groups, self.options.pairs)

    def train(self, fresh: Sequence[Ranking], step: int) -> None:
        """Makes `options.updates` updates, each on a share of `fresh` mixed with replayed rankings.

        Then adds `fresh` to the history.
        """
        memory = self.model.trainer.memory
        memory.onload_weights()
        stride = self.options.updates
        trained = 0
        updates = []
        for number in range(min(stride, len(fresh))):
            batch = self.history.mixed(fresh[number::stride], f"{step}/{number}")
            updates += self.model.update(ranking_batch(batch)).updates
            trained += len(batch)
        memory.offload_all()
        self.history.add(fresh)
        metrics: dict[str, float] = {
            "history": len(self.history.rankings),
            "rankings": trained,
            "replayed": trained - len(fresh),
        }
        if updates:
            metrics["loss"] = fmean(update.loss for update in updates)
            # each measured before its update
            metrics["accuracy"] = fmean(update.metrics["accuracy"] for update in updates)
        self.add({f"reward_model/{name}": value for name, value in metrics.items()})


def iterative_grpo(
    rl: RlRun,  # `rl.steps` counts the steps of all iterations
    steps: int,  # policy steps per iteration
    reset_reference: Callable[[], None],  # Iterations.reset; also offloads the policy
    reward_model: RewardModelTraining | None,  # None: the reward model is not trained
) -> None:
    for first in range(rl.start - rl.start % steps, rl.steps, steps):
        if rl.start == first:  # otherwise the run resumed within this iteration
            rl.checkpoint.hold()  # until the next step is done, no other state can be saved
            with rl.phases.sync():
                rl.weights.publish(version=first)
            fresh = []
            with rl.phases.rollout():
                if reward_model:
                    fresh = reward_model.sample(rl.prompts, first)
            with rl.phases.train():
                reset_reference()
                if reward_model:
                    reward_model.train(fresh, first)
        rl.steps = first + steps
        train(rl)
        rl.start = rl.steps


class Iterations:
    """Provides `loop` and `further` to train_policy: the iterations, and extra checkpoint state."""

    learner: Learner
    reward_model: RewardModel | None  # None if the reward model is not trained

    def __init__(self, rank: RankContext) -> None:
        self.rank = rank
        self.settings = rank.config.iterative
        options = self.settings.reward_model
        self.history = History(options.replay, options.history, rank.config.run.seed)

    def further(self, learner: Learner, reward_model: RewardModel | None) -> Further:
        self.learner = learner
        policy = policy_of(learner)
        self.reward_model = None
        if self.settings.reward_model.train:
            self.reward_model = reward_model
        reference = None
        if self.settings.reset_reference and policy.reference is not None:
            reference = policy.reference.in_use
        if self.reward_model is None:
            return Further(reference=reference)
        return Further(
            {REWARD_MODEL: self.reward_model.trainer},
            {"replay": self.history},
            self.reward_model.onloaded,
            reference,
        )

    def loop(self, run: RlRun) -> None:
        iterative_grpo(run, run.steps // self.settings.iterations, self.reset, self._training(run))

    def reset(self) -> None:
        """Copies the policy to the reference (if so configured), then offloads the learner."""
        reference = policy_of(self.learner).reference
        if self.settings.reset_reference and isinstance(reference, Reference):
            reference.reset()
        for trainer in self.learner.trainers:
            trainer.memory.offload_all()

    def _training(self, run: RlRun) -> RewardModelTraining | None:
        if self.reward_model is None:
            return None
        config = self.rank.config
        options = self.settings.reward_model
        rollouts = run.rollouts
        assert isinstance(rollouts, schedule.Rollouts)
        assert isinstance(rollouts.generate, Exchange)
        others = [reward for reward in config.rewards if reward.name != "model"]
        labels = options.labels or others
        scorer = make_scorer(labels, decode=self.rank.tokenizer.decode, answer=config.task.answer)
        rollouts = replace(
            rollouts,
            generate=replace(rollouts.generate, rewards=scorer, score=list),
            has_spread=schedule.has_spread,
            filter_zero_std=True,
            greedy_baseline=False,
        )
        model = Rankings(self.reward_model.trainer, self.reward_model.head, by_prompt=True)
        return RewardModelTraining(model, rollouts, self.history, options, run.telemetry.add)
