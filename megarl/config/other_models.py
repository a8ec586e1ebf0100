"""Checks of the models beside the policy: critic, reward model, teacher and reference."""

from __future__ import annotations

from megarl.config.names import ENGINE_STAGES
from megarl.config.schema import Config, Critic
from megarl.config.sizes import check_model
from megarl.models.hub import model_folder
from megarl.models.registry import read_model
from megarl.models.shape import ModelShape


def check_critic(config: Config, shape: ModelShape) -> None:
    critic, advantage = config.critic, config.algorithm.advantage
    if not config.algorithm.needs_critic:
        for key, value in critic:
            if value != getattr(Critic(), key):
                raise ValueError(
                    f"critic.{key}={value}, but algorithm.advantage={advantage} has no critic; remove it, or use "
                    "algorithm.preset=ppo"
                )
        return
    if critic.min_lr > critic.lr:
        raise ValueError(f"critic.min_lr={critic.min_lr} exceeds critic.lr={critic.lr}; lower it")
    if critic.warmup_steps >= config.train.steps > 0:
        raise ValueError(
            f"critic.warmup_steps={critic.warmup_steps} covers all train.steps={config.train.steps}, so the policy "
            "is never updated; lower it"
        )
    if critic.model is None:
        return
    if not (folder := model_folder(critic.model, None)).is_dir():
        raise ValueError(f"critic.model={critic.model} is not a folder; give that of a model in Hugging Face format")
    other = read_model(folder)
    check_model(config, other)
    if other.vocab != shape.vocab:
        raise ValueError(
            f"critic.model={critic.model} has a vocabulary of {other.vocab}, but the policy's is {shape.vocab}; use a "
            "model of the same tokenizer"
        )


def check_reward_model(config: Config, shape: ModelShape) -> None:
    options = config.reward_model
    if config.stage == "reward_model" and shape.bridge is not None:
        raise ValueError(f"stage=reward_model does not support {shape.family}, which has no table; use another model")
    if options.head == "scalar" and options.aggregate != "last":
        text = f"reward_model.aggregate={options.aggregate} needs the scores of all tokens"
        raise ValueError(f"{text}; set reward_model.head=token")
    if options.process and (options.head, options.centre, options.average) != ("scalar", 0.0, "pairs"):
        raise ValueError("reward_model.process=true has no pairs; remove reward_model.head, centre and average")


def check_frozen(config: Config) -> None:
    """Raises ValueError for a teacher or reference model that is missing, unused, or cannot be asked."""
    algorithm, distill_coef = config.algorithm, config.algorithm.distill_coef
    if distill_coef and config.teacher is None:
        raise ValueError(f"algorithm.distill_coef={distill_coef} needs a teacher; set teacher.model or teacher.url")
    if distill_coef and algorithm.filter_zero_std and not any(reward.weight for reward in config.rewards):
        raise ValueError("algorithm.filter_zero_std=true drops every group if no reward has a weight; set it to false")
    reads = {"teacher": distill_coef > 0, "reference": algorithm.needs_reference}
    for key, coef in (("teacher", "distill_coef"), ("reference", "kl.coef")):
        if (part := getattr(config, key)) is None:
            continue
        if not reads[key] or config.stage not in ENGINE_STAGES:
            raise ValueError(f"{key} is set, but nothing reads it; remove it, or set algorithm.{coef} in stage: rl")
        if (part.model is None) == (part.url is None):
            raise ValueError(f"{key}.model={part.model} and {key}.url={part.url}: set one of them")
        if part.url is not None and (temperature := config.rollout.temperature) != 1:
            raise ValueError(f"rollout.temperature={temperature}, but {key}.url gives log-probs at 1; use {key}.model")
        if part.model is not None:
            if not (folder := model_folder(part.model, None)).is_dir():
                raise ValueError(f"{key}.model={folder} is not a folder; name one of a Hugging Face model")
            check_model(config, read_model(folder))
