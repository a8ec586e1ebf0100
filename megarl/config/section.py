"""The base of all sections of a config, some of them, and what all checks of a config share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

Options = dict[str, Any]


def did_you_mean(name: str, known: Iterable[str], otherwise: str, *, most: int = 1) -> str:
    """Suggests up to `most` similar names; `otherwise` is the remedy if none is."""
    near = get_close_matches(name, [*known], n=most)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def refuse(problems: Mapping[str, object], start: str = "") -> None:
    """Raises ValueError with `start` and the first message whose condition holds; `problems`: message -> condition."""
    if problem := next((text for text, is_wrong in problems.items() if is_wrong), None):
        raise ValueError(start + problem)


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"it is not a regular expression ({error})") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_check_pattern)]


class Section(BaseModel):
    # run.name=7 is a name
    model_config = ConfigDict(
        extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False
    )


class Reward(Section):
    name: str  # accuracy, format, code, judge, process, model; a URL; or the dotted path of a function
    weight: float = 1.0
    options: Options = {}


class RewardModelUpdates(Section):
    """How the model of the reward `model` is trained on at the start of each iteration of iterative_grpo."""

    train: bool = True
    prompts: PositiveInt = 32  # sampled afresh; the responses to each are ranked
    labels: tuple[Reward, ...] = ()  # what ranks them; empty: the run's rewards other than `model`
    pairs: Literal["all", "best_worst"] = "all"  # of a ranking
    updates: PositiveInt = 4  # on an equal share of the rankings each
    lr: NonNegativeFloat = 1.0e-5
    replay: float = Field(
        default=0.1, ge=0, lt=1
    )  # share of the rankings of an update that are of earlier iterations
    history: PositiveInt = 1024  # rankings kept for it, the newest


class Iterative(Section):
    """Of the stage iterative_grpo."""

    iterations: PositiveInt = 1  # of train.steps / iterations steps of the policy each
    reset_reference: bool = (
        True  # the reference of an iteration is the policy at its start; False: the first model
    )
    reward_model: RewardModelUpdates = RewardModelUpdates()


class Fp8(Section):
    """Training in FP8 (megarl.trainer.fp8): the linear layers' products, forward and backward."""

    recipe: Literal["blockwise", "tensorwise", "mxfp8", "delayed"] = "blockwise"
    params: bool = False  # parameters are rounded to FP8 after each update; main weights are fp32. Emulated only
    first_last_bf16: NonNegativeInt = 0  # as many layers at each end stay in train.dtype
    emulate: bool = False  # round as the recipe does, in plain torch, on a CPU


class Lora(Section):
    """Low-rank adapters of linear layers. Only they are trained; the base model is the reference policy."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0  # an adapter adds alpha / rank * B A x
    targets: tuple[str, ...] = (
        "all-linear",
    )  # Hugging Face's names, as q_proj; all-linear: but router and head
    dropout: float = Field(
        default=0.0, ge=0, lt=1
    )  # of an adapter's input, in the stages sft and dpo
    sync: Literal["merged", "adapter"] = (
        "merged"  # adapter: the engine keeps the base, and later syncs move adapters
    )
    path: str | None = (
        None  # folder of a PEFT adapter to begin with; None: B = 0, so the base model
    )


class Sft(Section):
    until_accuracy: float | None = Field(
        default=None, gt=0, lt=1
    )  # stop when the sampled accuracy reaches this
    roles: tuple[str, ...] = Field(
        default=("assistant",), min_length=1
    )  # of a conversation: whose turns are learned
    patience: PositiveInt | None = (
        None  # stop after as many evaluations without a lower held-out loss; null: never
    )


class Dpo(Section):
    """Of the stages dpo and iterative_dpo (megarl.algorithms.preference)."""

    beta: PositiveFloat = 0.1  # strength of the tie to the reference
    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5
    )  # of sigmoid and robust: the share of flipped labels
    average: bool | None = (
        None  # log-probs over the tokens of a response, instead of their sum; None: for ipo
    )
    reference: Literal["initial", "previous"] = (
        "initial"  # of iterative_dpo: the first model, or that of this round
    )

    @property
    def averages(self) -> bool:
        return self.loss == "ipo" if self.average is None else self.average


class RewardModel(Section):
    """Of stage reward_model: Bradley-Terry over compared responses, or with `process`, right and wrong steps."""

    head: Literal["scalar", "token"] = (
        "scalar"  # the score of a response's last token, or aggregated from all tokens
    )
    aggregate: Literal["last", "sum", "mean", "max", "min", "weighted"] = (
        "last"  # weighted: by a second output
    )
    centre: NonNegativeFloat = 0.0  # coefficient of (better + worse)^2, which keeps scores near 0
    average: Literal["pairs", "prompts"] = "pairs"  # what counts equally in the loss of an update
    process: bool = False  # one score at the last token of each step
    separator: str = "\n"  # follows every step, and ends it
