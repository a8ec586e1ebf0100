"""Iterative GRPO: reference and reward model follow the policy (DeepSeekMath, arXiv 2402.03300, algorithm 1).

    an iteration   the policy samples, and the run's labels rank its samples
                   reference    <- policy, bit for bit
                   reward model <- the rankings, and a share of those of earlier iterations
                   stages/rl.train: `steps` steps of the policy against both

What precedes the steps happens at a multiple of `steps`. A run that resumes there repeats it, from the state that
`hold` has saved; one that resumes at another step goes on with the reference and reward model of its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from megarl.config.section import RewardModelUpdates
from megarl.data.preferences import Ranking, Replay, ranking_batch, rankings
from megarl.roles import Prompts, Rollouts
from megarl.stages.reward_model import Rankings
from megarl.stages.rl import RlRun, train


@dataclass(frozen=True)
class RewardModelTraining:
    """Trains the reward model on rankings of the policy's samples."""

    model: Rankings
    rollouts: Rollouts  # scored by the labels
    replay: Replay
    options: RewardModelUpdates
    add: Callable[[Mapping[str, float]], None]  # Telemetry.add

    def sample(self, prompts: Prompts, step: int) -> list[Ranking]:
        rollout = self.rollouts.collect(prompts, self.options.prompts, version=step)
        self.rollouts.trained(step, by="reward_model")
        return rankings(rollout.groups, self.options.pairs)

    def train(self, fresh: Sequence[Ranking], step: int) -> None:
        """Makes `updates` updates, each on its share of `fresh` and a replay, then adds `fresh` to the history."""
        shares = [
            share
            for number in range(self.options.updates)
            if (share := fresh[number :: self.options.updates])
        ]
        mixed = [
            self.replay.mixed(share, f"{step}/{number}") for number, share in enumerate(shares)
        ]
        memory = self.model.trainer.memory
        memory.onload_weights()
        updates = [
            update for batch in mixed for update in self.model.update(ranking_batch(batch)).updates
        ]
        memory.offload_all()
        self.replay.add(fresh)
        trained, metrics = sum(map(len, mixed)), dict[str, float](history=len(self.replay.history))
        metrics |= {"rankings": trained, "replayed": trained - len(fresh)}
        if updates:
            accuracy = fmean(update.metrics["accuracy"] for update in updates)  # before each update
            metrics |= {"loss": fmean(update.loss for update in updates), "accuracy": accuracy}
        self.add({f"reward_model/{name}": value for name, value in metrics.items()})


def iterative_grpo(
    rl: RlRun,  # `start` is the number of steps already done, `steps` the last one of all iterations
    steps: int,  # of the policy in an iteration
    reset_reference: Callable[[], None],  # if it does not stay; offloads the policy
    reward_model: RewardModelTraining | None,  # None: it stays
) -> None:
    for first in range(rl.start - rl.start % steps, rl.steps, steps):
        if rl.start == first:  # else the run has resumed within the iteration
            rl.checkpoint.hold()  # until the next step is done, nothing else can be saved
            with rl.phases.sync():
                rl.weights.publish(version=first)
            with rl.phases.rollout():
                fresh = reward_model.sample(rl.prompts, first) if reward_model else []
            with rl.phases.train():
                reset_reference()
                if reward_model:
                    reward_model.train(fresh, first)
        rl.steps = first + steps
        train(rl)
        rl.start = rl.steps
