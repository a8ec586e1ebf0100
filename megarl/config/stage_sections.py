"""Sections that only the stages without rewards read: sft, dpo (and iterative_dpo) and reward_model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic.types import NonNegativeFloat, PositiveFloat, PositiveInt

from megarl.config.section import Section


class Sft(Section):
    until_accuracy: float | None = Field(default=None, gt=0, lt=1)  # stop when the sampled accuracy reaches this
    roles: tuple[str, ...] = Field(default=("assistant",), min_length=1)  # of a conversation: whose turns are learned
    patience: PositiveInt | None = None  # stop after as many evaluations without a lower held-out loss; null: never


class Dpo(Section):
    """Of the stages dpo and iterative_dpo (megarl.algorithms.preference)."""

    beta: PositiveFloat = 0.1  # strength of the tie to the reference
    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)  # of sigmoid and robust: the share of flipped labels
    average: bool | None = None  # log-probs over the tokens of a response, instead of their sum; None: for ipo
    reference: Literal["initial", "previous"] = "initial"  # of iterative_dpo: the first model, or that of this round

    @property
    def averages(self) -> bool:
        return self.loss == "ipo" if self.average is None else self.average


class RewardModel(Section):
    """Of stage reward_model: Bradley-Terry over compared responses, or with `process`, right and wrong steps."""

    head: Literal["scalar", "token"] = "scalar"  # the score of a response's last token, or aggregated from all tokens
    aggregate: Literal["last", "sum", "mean", "max", "min", "weighted"] = "last"  # weighted: by a second output
    centre: NonNegativeFloat = 0.0  # coefficient of (better + worse)^2, which keeps scores near 0
    average: Literal["pairs", "prompts"] = "pairs"  # what counts equally in the loss of an update
    process: bool = False  # one score at the last token of each step
    separator: str = "\n"  # follows every step, and ends it
