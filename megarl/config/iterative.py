"""The section `iterative`, and checks of it and of the reward `model` against the rest of a config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from pydantic.types import NonNegativeFloat, PositiveInt

from megarl.config.section import Reward, Section

if TYPE_CHECKING:
    from megarl.config.schema import Config


class RewardModelUpdates(Section):
    """How the model of the reward `model` is trained on at the start of each iteration of iterative_grpo."""

    train: bool = True
    prompts: PositiveInt = 32  # sampled afresh; the responses to each are ranked
    labels: tuple[Reward, ...] = ()  # what ranks them; empty: the run's rewards other than `model`
    pairs: Literal["all", "best_worst"] = "all"  # of a ranking
    updates: PositiveInt = 4  # on an equal share of the rankings each
    lr: NonNegativeFloat = 1.0e-5
    replay: float = Field(default=0.1, ge=0, lt=1)  # share of the rankings of an update that are of earlier iterations
    history: PositiveInt = 1024  # rankings kept for it, the newest


class Iterative(Section):
    """Of the stage iterative_grpo."""

    iterations: PositiveInt = 1  # of train.steps / iterations steps of the policy each
    reset_reference: bool = True  # the reference of an iteration is the policy at its start; False: the first model
    reward_model: RewardModelUpdates = RewardModelUpdates()


def check_iterative(config: Config) -> None:
    """Raises ValueError with the values and the remedy."""
    iterations, updates = config.iterative.iterations, config.iterative.reward_model
    model = next((reward for reward in config.rewards if reward.name == "model"), None)
    labels = updates.labels or tuple(reward for reward in config.rewards if reward.name != "model")
    is_iterative = config.stage == "iterative_grpo"
    is_trained = is_iterative and updates.train
    has_labels = any(reward.weight for reward in labels) and all(reward.name != "model" for reward in labels)
    problems = {
        "rollout.sleep_level=2 frees weights that the engine needs once the reward `model` has scored; set 1": (
            model and config.rollout.sleep_level == 2
        ),
        "rewards: name='model' needs options.path, the folder of a reward model; only stage: iterative_grpo, which "
        "trains it, can begin with the policy's weights": model and not is_trained and not model.options.get("path"),
        f"train.steps={config.train.steps} is not divisible by iterative.iterations={iterations}; all iterations have "
        "equally many steps": is_iterative and config.train.steps % iterations,
        "iterative.reward_model.train=true, but rewards has no `model`; add {name: model}, or set it to false": (
            is_trained and not model
        ),
        "iterative.reward_model.labels must have a reward other than `model`, with a weight, to rank the samples that "
        "the reward model learns from; e.g. labels: [{name: accuracy}]": is_trained and not has_labels,
        f"iterative.reward_model.updates={updates.updates} exceeds its prompts={updates.prompts}, and each update "
        "needs one; lower it": is_trained and updates.updates > updates.prompts,
    }
    if problem := next((text for text, is_wrong in problems.items() if is_wrong), None):
        raise ValueError(problem)
