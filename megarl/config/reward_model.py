"""Section `reward_model` (stage reward_model), and its check."""

from typing import Literal

from pydantic import NonNegativeFloat

from megarl.config.section import Config, Section, refuse
from megarl.models.shape import ModelShape


class RewardModel(Section):
    """Training of reward models: Bradley-Terry on preference pairs, or with `process`, on reasoning
    steps labelled right or wrong.
    """

    head: Literal["scalar", "token"] = "scalar"
    """Score of a response: the score of its last token, or aggregated from all tokens."""
    aggregate: Literal["last", "sum", "mean", "max", "min", "weighted"] = "last"
    """Aggregation of the token scores of a token head; weighted: with weights from a second
    output."""
    centre: NonNegativeFloat = 0.0
    """Coefficient of (better + worse)^2, which keeps scores near 0."""
    average: Literal["pairs", "prompts"] = "pairs"
    """Unit with equal weight in the loss of an update."""
    process: bool = False
    """Trains a process reward model: one score at the last token of each reasoning step."""
    separator: str = "\n"
    """Text that ends every reasoning step."""


def check_reward_model(config: Config, shape: ModelShape) -> None:
    """Raises ValueError for contradictory settings, or a model that the stage cannot train."""
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
