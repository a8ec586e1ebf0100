"""`reward_model`: settings of the stage reward_model."""

from typing import Literal

from pydantic import NonNegativeFloat

from megarl.config.section import Config, Section, refuse
from megarl.models.shape import ModelShape


class RewardModel(Section):
    """Reward models: Bradley-Terry over compared responses, or with `process`, right and wrong
    steps.
    """

    head: Literal["scalar", "token"] = "scalar"
    """Score of a response: that of its last token, or aggregated from all tokens."""
    aggregate: Literal["last", "sum", "mean", "max", "min", "weighted"] = "last"
    """Aggregation of a token head's scores; weighted: by a second output."""
    centre: NonNegativeFloat = 0.0
    """Coefficient of (better + worse)^2, which keeps scores near 0."""
    average: Literal["pairs", "prompts"] = "pairs"
    """Unit that counts equally in the loss of an update."""
    process: bool = False
    """Trains a process reward model: one score at the last token of each step."""
    separator: str = "\n"
    """Text that follows every step, and ends it."""


def check_reward_model(config: Config, shape: ModelShape) -> None:
    """Raises ValueError for settings of `reward_model` that contradict each other, and for a model
    that the stage cannot train.
    """
    options = config.reward_model
    is_plain = options.head == "scalar" and options.centre == 0 and options.average == "pairs"
    refuse(
        (
            options.head == "scalar" and options.aggregate != "last",
            f"reward_model.aggregate={options.aggregate} needs the scores of all tokens; "
            "set reward_model.head=token",
        ),
        (
            options.process and not is_plain,
            "reward_model.process=true has no pairs; remove reward_model.head, centre and average",
        ),
        (
            config.stage == "reward_model" and shape.bridge,
            f"stage=reward_model does not support {shape.family}, which has no table; use another",
        ),
    )
