"""Section `dpo` (stages dpo and iterative_dpo), and the checks of stages that compare samples."""

from typing import Literal

from pydantic import Field, PositiveFloat

from megarl.config.algorithm import Algorithm
from megarl.config.presets import PRESETS
from megarl.config.section import Config, Section, refuse

# keys of `algorithm` that apply before samples are compared
READ_BEFORE = {"truncated", "truncated_reward", "overlong", "filter_zero_std", "max_refills"}


class Dpo(Section):
    """Direct preference optimization (megarl.algorithms.preference)."""

    beta: PositiveFloat = 0.1
    """Coefficient of the log-ratio to the reference; higher values stay closer to the reference."""
    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """Loss of a pair: sigmoid is the loss of the DPO paper, ipo regresses the margin, robust
    assumes flipped labels.
    """
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed fraction of flipped labels, for the losses sigmoid and robust."""
    average: bool | None = None
    """Averages log-probs over the tokens of a response instead of summing them; null: only for
    ipo.
    """
    reference: Literal["initial", "previous"] = "initial"
    """Reference of iterative_dpo: the initial model, or the model of the previous round."""

    @property
    def averages(self) -> bool:
        return self.loss == "ipo" if self.average is None else self.average


def check_dpo_section(config: Config) -> None:
    """Raises ValueError for label smoothing with a loss that ignores it."""
    dpo = config.dpo
    if dpo.label_smoothing and dpo.loss not in ("sigmoid", "robust"):
        raise ValueError(
            f"dpo.label_smoothing={dpo.label_smoothing} has no effect on dpo.loss={dpo.loss}; "
            "set it to 0"
        )


def check_dpo(config: Config) -> None:
    """Raises ValueError for settings that stage dpo would ignore."""
    epochs = config.train.epochs_per_batch
    refuse(
        (
            config.dpo.reference == "previous",
            "dpo.reference=previous needs rounds, which stage: dpo lacks; use stage: iterative_dpo",
        ),
        (
            epochs > 1,
            f"train.epochs_per_batch={epochs} has no effect in stage: dpo; raise "
            "train.steps instead",
        ),
    )


def check_comparison(config: Config) -> None:
    """Raises ValueError for settings that the stages iterative_dpo and best_of_n would ignore."""
    stage = config.stage
    read = READ_BEFORE | {"aggregation"} if stage == "best_of_n" else READ_BEFORE
    if config.rollout.samples_per_prompt == 1:
        raise ValueError(
            f"rollout.samples_per_prompt=1 leaves stage: {stage} nothing to compare; use 2 or more"
        )
    usual = [Algorithm().model_dump(), Algorithm.model_validate(PRESETS["grpo"]).model_dump()]
    for key, value in config.algorithm.model_dump(exclude=read).items():
        if value not in [values[key] for values in usual]:
            raise ValueError(f"algorithm.{key}={value} has no effect in stage: {stage}; remove it")
