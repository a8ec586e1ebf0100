"""Section `algorithm`: the objective, and its checks.

A preset (presets.py) is a named set of these values; printed configs include them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    create_model,
    model_validator,
)

from megarl.config import estimators
from megarl.config.presets import PRESETS
from megarl.config.section import Config, Options, Section, check_options, one_of, refuse

AT_LEAST = {"dual_clip": 1.0}  # bound -> value that it must exceed; other bounds must be >= 0


class KlTerm(Section):
    """The KL(policy || reference) term. The default estimator is k1 in the reward, k3+ in the
    loss."""

    against: Literal["reference", "old"] = "reference"
    """Second argument of KL: the reference model, or with old, the policy before the updates on a
    batch (arXiv 1707.06347, section 4)."""
    estimator: Annotated[str, one_of(estimators.KL)] = "k3+"
    """Estimator of KL (megarl.algorithms.kl): k1, k2, k3, k3+ or abs."""
    where: Literal["reward", "loss"] = "loss"
    """Use of the term: subtracted from the reward of each token, or added to the loss."""
    coef: NonNegativeFloat = 0.0
    """Coefficient; 0: no KL term."""
    target: float | None = Field(default=None, gt=0)
    """Target mean KL, to which the coefficient is adapted; null: the coefficient is fixed."""
    horizon: PositiveInt = 10000
    """Number of samples over which the coefficient adapts."""
    value_clamp: PositiveFloat | None = None
    """Bound on the absolute value of the estimator; null: none. Several trainers use 10."""
    importance_weighted: bool = False
    """Multiplies KL in the loss by the ratio pi / pi_old (DeepSeek-V3.2, arXiv 2512.02556)."""

    @model_validator(mode="before")
    @classmethod
    def _estimator_by_place(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("where") == "reward":
            return {"estimator": "k1"} | values
        return values


class Overlong(Section):
    """Penalty for responses close to rollout.max_tokens (DAPO, arXiv 2503.14476, section 3.4)."""

    buffer: NonNegativeFloat = 0.0
    """Number of tokens before max_tokens over which the penalty grows linearly; a value below 1 is
    a fraction of max_tokens."""
    factor: NonNegativeFloat = 1.0
    """Penalty for a response of max_tokens tokens."""


def _bound(name: str) -> tuple[Any, Any]:
    """Returns (type, Field) of the loss bound `name`, for create_model."""
    text = f"Bound {name} of the loss (megarl.algorithms.losses); null: off, or its own default."
    if name in AT_LEAST:
        return float | None, Field(default=None, gt=AT_LEAST[name], description=text)
    return float | None, Field(default=None, ge=0, description=text)


class _Estimators(Section):
    preset: Annotated[str, one_of(PRESETS)] = "grpo"
    """Preset whose values apply unless set explicitly (megarl.config.presets)."""
    advantage: Annotated[str, one_of(estimators.ADVANTAGES)] = "grpo"
    """Advantage estimator (megarl.algorithms.advantages)."""
    advantage_options: Options = {}
    """Keyword options of the advantage estimator."""
    loss: Annotated[str, one_of(estimators.LOSSES)] = "ppo_clip"
    """Policy loss (megarl.algorithms.losses)."""
    loss_options: Options = {}
    """Keyword options of the loss, except its bounds."""
    token_selection_options: Options = {}
    """Keyword options of the token selection in the losses clip_cov and kl_cov."""


if TYPE_CHECKING:
    _Bounds = _Estimators
else:  # one key per bound of any loss, named like the parameter of the loss function
    _Bounds = create_model(
        "_Bounds", __base__=_Estimators, **{name: _bound(name) for name in estimators.BOUND_NAMES}
    )


class Algorithm(_Bounds):
    """The objective. A preset is a named set of these values; printed configs include them."""

    aggregation: Annotated[str, one_of(estimators.AGGREGATIONS)] = "token-mean"
    """Weighting of tokens in the loss of an update (megarl.algorithms.aggregation)."""
    kl: KlTerm = KlTerm()
    """KL term."""
    distill_coef: NonNegativeFloat = 0.0
    """Coefficient of KL(policy || teacher): in each token's advantage, or with distill_top_k in the
    loss; 0: no distillation."""
    distill_top_k: NonNegativeInt = 0
    """Number of the teacher's likeliest tokens over which the divergence is computed; all other
    tokens are one outcome. 0: sampled tokens only."""
    distill_beta: float = Field(default=1.0, ge=0, le=1)
    """Divergence with distill_top_k: KL(policy || teacher) for 1, KL(teacher || policy) for 0, the
    generalised Jensen-Shannon divergence for values between."""
    correction: Annotated[str, one_of(estimators.CORRECTIONS)] = "none"
    """Correction for mismatches of engine and trainer log-probs (megarl.algorithms.corrections)."""
    correction_options: Options = {}
    """Keyword options of the correction."""
    use_rollout_logprobs: bool = False
    """Uses the engine's log-probs as the old ones, so that the ratio in the loss includes the
    mismatch of engine and trainer.
    """
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    filter_zero_std: bool = False
    """Replaces groups whose (clipped) rewards are all equal with samples of new prompts (DAPO's
    dynamic sampling)."""
    max_refills: NonNegativeInt = 4
    """Maximum number of batches of replacement prompts in a step; if these are not enough, the step
    has fewer groups."""
    overlong: Overlong = Overlong()
    """Penalty for long responses."""
    truncated: Literal["train", "mask", "penalise"] = "train"
    """Treatment of responses truncated at rollout.max_tokens: train on them, mask them in the loss,
    or penalise them with truncated_reward."""
    truncated_reward: float = 0.0
    """Reward of truncated responses with truncated=penalise; replaces their own reward."""
    reward_clip: tuple[float, float] | None = None
    """Lower and upper bound of outcome rewards; null: none."""
    reward_clip_stage: Literal["raw", "normalised"] = "raw"
    """Clips rewards before (raw) or after normalisation."""
    normalise_rewards: bool = False
    """Normalises rewards by the mean and std of all rewards since the start of training."""

    @model_validator(mode="before")
    @classmethod
    def _bounds_of_the_loss(cls, values: Any) -> Any:
        """Fills in the default bounds of the loss, so that a printed config includes them.

        An explicit null of dual_clip is kept, because it turns the bound off; an explicit null of
        another bound means its default.
        """
        if not isinstance(values, dict):
            return values
        defaults = estimators.BOUNDS.get(str(values.get("loss", "ppo_clip")), {})
        unset = set(estimators.BOUND_NAMES) - AT_LEAST.keys()
        explicit = {key: x for key, x in values.items() if x is not None or key not in unset}
        return defaults | explicit

    @property
    def loss_bounds(self) -> dict[str, float | None]:
        """The bounds of the selected loss, by name."""
        return {name: getattr(self, name) for name in estimators.BOUNDS[self.loss]}

    @property
    def needs_reference(self) -> bool:
        return self.kl.coef > 0 and self.kl.against == "reference"

    @property
    def needs_critic(self) -> bool:
        return "values_T" in self._advantage.inputs

    @property
    def needs_greedy_baseline(self) -> bool:
        return "baseline_N" in self._advantage.inputs

    @property
    def _advantage(self) -> estimators.Estimator:
        return estimators.ADVANTAGES[self.advantage]


def check_algorithm(config: Config) -> None:
    """Raises ValueError for unknown options and contradictory settings."""
    algorithm = config.algorithm
    _check_options(algorithm, "advantage", "advantage", estimators.ADVANTAGES)
    _check_options(algorithm, "loss", "loss", estimators.LOSSES)
    _check_options(algorithm, "loss", "token_selection", estimators.SELECT)
    _check_options(algorithm, "correction", "correction", estimators.CORRECTIONS)
    if not config.stage_spec.needs_engine:
        return
    _check_group(config)
    if algorithm.loss == "sft":
        raise ValueError("algorithm.loss=sft is for stage: sft; use ppo_clip with stage: rl")
    _check_bounds(algorithm)
    _check_objective(config)
    _check_kl_term(config)


def _check_options(
    algorithm: Algorithm, key: str, kind: str, table: Mapping[str, estimators.Estimator]
) -> None:
    """Raises ValueError if `algorithm.<kind>_options` has an option that the function named by
    `algorithm.<key>` does not take. `table` has the known functions.
    """
    name = getattr(algorithm, key)
    known = table.get(name, estimators.Estimator()).options
    options = getattr(algorithm, f"{kind}_options")
    check_options(f"algorithm.{key}={name}", options, known, f"algorithm.{kind}_options.")


def _check_group(config: Config) -> None:
    """Raises ValueError if samples are compared within groups that have a single sample."""
    algorithm = config.algorithm
    singleton = estimators.ADVANTAGES[algorithm.advantage].options.get("singleton")
    scores_steps = any(reward.name in ("process", "model") for reward in config.rewards)
    if (
        config.rollout.samples_per_prompt > 1
        or algorithm.advantage_options.get("singleton", singleton) in (None, "raw")
        or (algorithm.advantage == "grpo_process" and scores_steps)
        or config.stage_spec.compares  # whose own check explains it
    ):
        return
    raise ValueError(
        f"rollout.samples_per_prompt=1 with advantage={algorithm.advantage} makes every advantage "
        "zero, because a sample is compared with its group; use 2 or more, or "
        "algorithm.preset=reinforce_pp"
    )


def _check_bounds(algorithm: Algorithm) -> None:
    """Raises ValueError for bounds that the loss does not have."""
    bounds = estimators.BOUNDS[algorithm.loss]
    for key in estimators.BOUND_NAMES:
        value = getattr(algorithm, key)
        refuse(
            (
                value is not None and key not in bounds,
                f"algorithm.{key}={value}, but loss={algorithm.loss} has no such bound "
                f"(it has {' and '.join(bounds) or 'none'}); remove it",
            ),
            (
                key in algorithm.loss_options,
                f"algorithm.loss_options.{key} is a key of `algorithm` itself; "
                f"write algorithm.{key}",
            ),
        )


def _check_objective(config: Config) -> None:
    """Raises ValueError for contradictory settings of advantage, loss, correction and rewards."""
    algorithm = config.algorithm
    kl = algorithm.kl
    has_steps = algorithm.advantage == "grpo_process"
    has_kl_reward = kl.where == "reward" and kl.coef > 0
    varies = has_steps or algorithm.needs_critic
    varies |= algorithm.distill_coef > 0 and not algorithm.distill_top_k
    varies |= has_kl_reward and algorithm.advantage in estimators.PER_TOKEN
    clip = algorithm.reward_clip
    buffer = algorithm.overlong.buffer
    max_tokens = config.rollout.max_tokens
    refuse(
        (
            algorithm.use_rollout_logprobs and algorithm.correction not in ("none", "opsm"),
            "algorithm.use_rollout_logprobs=true already includes the mismatch with the engine in "
            f"the loss's ratio, so correction={algorithm.correction} would count it twice; "
            "set algorithm.correction=none or opsm",
        ),
        (
            algorithm.loss == "gspo" and varies,
            "algorithm.loss=gspo needs one advantage per response, but "
            f"advantage={algorithm.advantage} with kl.where={kl.where} computes one per token; "
            "use advantage=grpo, or loss=ppo_clip",
        ),
        (
            has_steps and has_kl_reward,
            "algorithm.advantage=grpo_process reads rewards only at the ends of steps and would "
            "ignore most of the KL that kl.where=reward adds to every token; set kl.where=loss",
        ),
        (
            clip is not None and not clip[0] < clip[1],
            f"algorithm.reward_clip={list(clip or ())} must be increasing, e.g. [-5, 5]",
        ),
        (
            algorithm.reward_clip_stage == "normalised" and not algorithm.normalise_rewards,
            "algorithm.reward_clip_stage=normalised needs normalise_rewards=true; set it, or "
            "choose raw",
        ),
        (
            clip is not None
            and algorithm.filter_zero_std
            and algorithm.reward_clip_stage == "normalised",
            "algorithm.filter_zero_std=true chooses groups before rewards are normalised, so it "
            "would keep groups that reward_clip_stage=normalised makes equal; choose raw, or set "
            "filter_zero_std=false",
        ),
        (
            buffer > max_tokens,
            f"algorithm.overlong.buffer={buffer:g} exceeds rollout.max_tokens={max_tokens}; lower "
            "it (below 1 it is a fraction of max_tokens)",
        ),
    )


def _check_kl_term(config: Config) -> None:
    """Raises ValueError for a KL term without effect or with a wrong gradient."""
    kl = config.algorithm.kl
    num_updates = config.train.updates_per_step * config.train.epochs_per_batch
    refuse(
        (
            kl.against == "old" and kl.where == "reward",
            "algorithm.kl.against=old is 0 before the first update, where rewards are; "
            "set kl.where=loss",
        ),
        (
            kl.against == "old" and kl.coef > 0 and num_updates == 1,
            "algorithm.kl.against=old has no effect with one update per batch, made at the old "
            "policy itself; raise train.epochs_per_batch or train.updates_per_step",
        ),
        (
            kl.target is not None and kl.coef == 0,
            f"algorithm.kl.target={kl.target} has no effect on kl.coef=0, which stays 0; "
            "set kl.coef",
        ),
        (
            kl.importance_weighted and kl.where == "reward",
            "algorithm.kl.importance_weighted=true needs KL in the loss; set kl.where=loss, or "
            "unset it",
        ),
        (
            kl.estimator == "k1" and kl.where == "loss" and kl.coef and not kl.importance_weighted,
            "algorithm.kl.estimator=k1 in the loss has an expected gradient of 0; use k2 or k3+",
        ),
    )
