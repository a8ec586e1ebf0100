"""Section `iterative` (stage iterative_grpo), and the checks of the reward `model`."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from megarl.config.model import read_and_check
from megarl.config.rewards import Reward, has_weight
from megarl.config.section import Config, Section, refuse


class RewardModelUpdates(Section):
    """Training of the reward `model` at the start of each iteration."""

    train: bool = True
    """Trains the reward model; false: the reward model is frozen."""
    prompts: PositiveInt = 32
    """Number of new prompts sampled in an iteration; the responses to each prompt are ranked."""
    labels: tuple[Reward, ...] = ()
    """Rewards that rank the responses; empty: the run's rewards other than `model`."""
    pairs: Literal["all", "best_worst"] = "all"
    """Pairs of a ranking to train on."""
    updates: PositiveInt = 4
    """Optimizer steps in an iteration, each on an equal share of the rankings."""
    lr: NonNegativeFloat = 1.0e-5
    """Learning rate of the reward model."""
    replay: float = Field(default=0.1, ge=0, lt=1)
    """Fraction of the rankings of an update that come from earlier iterations."""
    history: PositiveInt = 1024
    """Number of newest rankings kept for replay."""


class Iterative(Section):
    """Iterative GRPO: reference and reward model follow the policy."""

    iterations: PositiveInt = 1
    """Number of iterations of a run, each with train.steps / iterations policy steps."""
    reset_reference: bool = True
    """Copies the policy to the reference at the start of each iteration; false: the initial model
    remains the reference.
    """
    reward_model: RewardModelUpdates = RewardModelUpdates()
    """Training of the reward model."""


def check_model_reward(config: Config) -> None:
    """Raises ValueError for a reward `model` that cannot be loaded, does not fit the layout, or
    does not work with the sleep level.
    """
    model = next((reward for reward in config.rewards if reward.name == "model"), None)
    if model is None:
        return
    path = model.options.get("path")
    is_trained = config.stage == "iterative_grpo" and config.iterative.reward_model.train
    refuse(
        (
            config.rollout.sleep_level == 2,
            "rollout.sleep_level=2 frees weights that the engine needs once the reward `model` has "
            "scored; set 1",
        ),
        (
            not is_trained and not path,
            "rewards: name='model' needs options.path, the folder of a reward model; only stage: "
            "iterative_grpo, which trains it, can begin with the policy's weights",
        ),
    )
    if isinstance(path, str):
        read_and_check(config, "rewards: name='model': path", path)


def check_iterative_grpo(config: Config) -> None:
    """Raises ValueError if iterations do not divide train.steps, or the reward model cannot be
    trained.
    """
    steps = config.train.steps
    iterations = config.iterative.iterations
    updates = config.iterative.reward_model
    others = tuple(reward for reward in config.rewards if reward.name != "model")
    has_model = len(others) < len(config.rewards)
    labels = updates.labels or others
    has_labels = has_weight(labels) and all(reward.name != "model" for reward in labels)
    refuse(
        (
            steps % iterations,
            f"train.steps={steps} is not divisible by iterative.iterations={iterations}; all "
            "iterations have equally many steps",
        ),
        (
            updates.train and not has_model,
            "iterative.reward_model.train=true, but rewards has no `model`; add {name: model}, or "
            "set it to false",
        ),
        (
            updates.train and not has_labels,
            "iterative.reward_model.labels must have a reward other than `model`, with a weight, "
            "to rank the samples that the reward model learns from; e.g. labels: [{name: "
            "accuracy}]",
        ),
        (
            updates.train and updates.updates > updates.prompts,
            f"iterative.reward_model.updates={updates.updates} exceeds its "
            f"prompts={updates.prompts}, and each update needs one; lower it",
        ),
    )
