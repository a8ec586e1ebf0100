"""Sections `critic`, `teacher` and `reference`: models in addition to the policy; their checks."""

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from megarl.config.model import read_and_check
from megarl.config.rewards import has_weight
from megarl.config.section import Config, Options, Section, refuse
from megarl.models.shape import ModelShape


class FrozenModel(Section):
    """A frozen model with the policy's tokenizer that computes log-probs of the policy's samples,
    either on the trainer's devices or behind a URL."""

    model: str | None = None
    """Folder or hub id (id@revision) of a Hugging Face model."""
    url: str | None = None
    """URL of a server that returns prompt_logprobs, such as vLLM: http://host:8000/v1."""
    served_name: str | None = None
    """Name of the model in requests to the server; null: the server's only model."""
    options: Options = {}
    """Settings of the requests (megarl.rewards.remote.HttpOptions): timeout_s, concurrency ..."""


class Critic(Section):
    """The value model of advantage gae. Settings without a key here, such as schedule and
    clip_grad, are those of `train`."""

    model: str | None = None
    """Folder or hub id (id@revision) of the initial model, for example a reward model; null: the
    policy's.
    """
    lr: NonNegativeFloat = 9.0e-6
    """Learning rate. The default is from the experiments of REINFORCE++ (arXiv 2501.03262), which
    use 5e-7 for the policy."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the schedule."""
    warmup_steps: NonNegativeInt = 0
    """Number of initial steps in which only the critic is updated; the policy's schedule advances
    meanwhile."""
    clip: PositiveFloat | None = 0.2
    """Bound on the change of a value during the updates of a step; null: off."""
    lam: float | None = Field(default=None, ge=0, le=1)
    """Lambda of the value targets (VAPO, arXiv 2504.05118, uses 1, and 0.95 for the advantage);
    null: the lambda of the advantage."""
    bootstrap_truncated: bool = False
    """Uses the value after the last token of a response truncated by length as its remaining
    reward, instead of 0."""


def check_critic(config: Config, shape: ModelShape) -> None:
    """Raises ValueError for critic settings without a critic, invalid schedules, or a critic whose
    layout or vocabulary does not fit the policy's.
    """
    critic = config.critic
    steps = config.train.steps
    if not config.algorithm.needs_critic:
        name = config.algorithm.advantage
        remedy = f"advantage={name} has no critic; remove it, or use algorithm.preset=ppo"
        for key, value in critic.model_dump(exclude_defaults=True).items():
            raise ValueError(f"critic.{key}={value}, but {remedy}")
        return
    refuse(
        (
            critic.min_lr > critic.lr,
            f"critic.min_lr={critic.min_lr} exceeds critic.lr={critic.lr}; lower it",
        ),
        (
            critic.warmup_steps >= steps > 0,
            f"critic.warmup_steps={critic.warmup_steps} covers all train.steps={steps}, so the "
            "policy is never updated; lower it",
        ),
    )
    if critic.model is None:
        return
    vocab = read_and_check(config, "critic.model", critic.model).vocab
    if vocab != shape.vocab:
        raise ValueError(
            f"critic.model={critic.model} has a vocabulary of {vocab}, but the policy's is "
            f"{shape.vocab}; use a model of the same tokenizer"
        )


def check_frozen(config: Config, shape: ModelShape) -> None:
    """Raises ValueError for a teacher or reference that is missing, unused or misconfigured."""
    algorithm = config.algorithm
    coef = algorithm.distill_coef
    top_k = algorithm.distill_top_k
    refuse(
        (
            top_k and not coef,
            f"algorithm.distill_top_k={top_k} has no effect with distill_coef=0; set that, "
            "e.g. to 1.0",
        ),
        (
            algorithm.distill_beta != 1 and not top_k,
            f"algorithm.distill_beta={algorithm.distill_beta} needs "
            "algorithm.distill_top_k, e.g. 64",
        ),
        (
            coef and config.teacher is None,
            f"algorithm.distill_coef={coef} needs a teacher; set teacher.model or teacher.url",
        ),
        (
            coef and algorithm.filter_zero_std and not has_weight(config.rewards),
            "algorithm.filter_zero_std=true drops every group if no reward has a weight; "
            "set it to false",
        ),
    )
    vocab = _check(config, "teacher", "distill_coef", coef > 0, shape.vocab)
    vocab = _check(config, "reference", "kl.coef", algorithm.needs_reference, vocab)
    if top_k > vocab:
        raise ValueError(
            f"algorithm.distill_top_k={top_k} exceeds the vocabulary of {vocab}; lower it"
        )


def _check(config: Config, key: str, coef: str, is_read: bool, vocab: int) -> int:
    """Checks the section `key` ("teacher" or "reference"); `coef` is the key of its coefficient,
    `is_read` is True if the objective uses the model.

    Returns the smaller of `vocab` and the model's vocabulary size; `vocab` without a model or for a
    model behind a URL. Raises ValueError for a contradiction.
    """
    part: FrozenModel | None = getattr(config, key)
    if part is None:
        return vocab
    temperature = config.rollout.temperature
    refuse(
        (
            not is_read or not config.stage_spec.needs_engine,
            f"{key} is set, but nothing reads it; remove it, or set algorithm.{coef} in stage: rl",
        ),
        (
            (part.model is None) == (part.url is None),
            f"{key}.model={part.model} and {key}.url={part.url}: set one of them",
        ),
        (
            part.url is not None and temperature != 1,
            f"rollout.temperature={temperature}, but {key}.url gives log-probs at 1; "
            f"use {key}.model",
        ),
    )
    if part.model is None:
        return vocab
    return min(vocab, read_and_check(config, f"{key}.model", part.model).vocab)
