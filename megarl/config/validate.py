"""Everything that can be known to be wrong before a process starts, each as one line with the values and the remedy.

    Config, Env --check_config--> Job (world arithmetic, model shape, warnings) | ValueError

Pure arithmetic and a few small files; no torch, so a mistake costs a second. What needs a task's or a
reward's code is asked by `megarl.launch.preflight`, which stands above those packages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megarl.config.names import (
    ADVANTAGES,
    AGGREGATIONS,
    CLIPS,
    CORRECTIONS,
    GROUP_ADVANTAGES,
    LOSSES,
    NOT_IN_THE_LOOP,
    SELECT,
    TOKEN_ADVANTAGES,
)
from megarl.config.random_model import hf_config
from megarl.config.schema import Algorithm, Config
from megarl.config.sizes import check_cpu_engine, check_gpu_trainer, check_model
from megarl.layout import Layout, smallest_world
from megarl.models.registry import parse_model, read_model
from megarl.models.shape import ModelShape
from megarl.platform.env import Env, count_gpus

__all__ = ["Job", "check_config", "model_shape"]


@dataclass(frozen=True, slots=True)
class Job:
    """What a config comes to on this machine."""

    world: int  # W, over all nodes
    gpus: int  # of this node; 0: CPU
    layout: Layout  # of rank 0
    replicas: int
    model: ModelShape
    rows: int  # samples of a step
    longest_row: int  # tokens
    warnings: tuple[str, ...]


def check_config(config: Config, env: Env, *, command: str = "train") -> Job:
    """Raises ValueError or FileNotFoundError with one line."""
    samples = config.stage == "rl" or command == "eval"  # with the engine, for the rewards
    _check_not_yet(config)
    shape = model_shape(config)
    gpus = count_gpus()
    world = _world_size(config, env, gpus)
    check_model(config, shape)
    _check_moe(config, shape)
    if gpus:
        check_gpu_trainer(config, shape)
    elif samples:
        check_cpu_engine(config, shape)
    _check_world(config, world, env)
    layout = Layout.of(config.parallel.sizes, world, rank=min(env.rank, world - 1))
    _check_algorithm(config)
    if samples:
        _check_rewards(config)
    _check_lengths(config, shape)
    _check_train(config, gpus)
    _check_resume(config)
    rows = config.train.prompts_per_step * (config.rollout.samples_per_prompt if config.stage == "rl" else 1)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    return Job(
        world=world,
        gpus=gpus,
        layout=layout,
        replicas=world // config.rollout.tensor,
        model=shape,
        rows=rows,
        longest_row=longest,
        warnings=tuple(_warnings(config, shape, layout, rows, longest)),
    )


def model_shape(config: Config) -> ModelShape:
    """The sizes of the model a run will train, whether it exists or is about to be made."""
    model = config.model
    if model.path is not None and model.create is not None:
        raise ValueError(f"both model.path={model.path} and model.create are given; keep one")
    if model.path is not None:
        return read_model(model.path)
    if model.create is None:
        raise ValueError(
            "no model: give model.path=DIR with a Hugging Face model, or a model.create section for a small random one"
        )
    return parse_model(hf_config(model.create), "model.create")


def _check_not_yet(config: Config) -> None:
    """Settings the schema reserves whose machinery is not in this version: refused rather than ignored."""
    reserved = (
        ("launch.topology", config.launch.topology, "colocated"),
        ("rollout.expert", config.rollout.expert, 1),
        ("rollout.replicas", config.rollout.replicas, None),
        ("rollout.max_staleness", config.rollout.max_staleness, 0),
        ("precision.fp8", config.precision.fp8, None),
        ("telemetry.tensorboard", config.telemetry.tensorboard, False),
        ("telemetry.wandb", config.telemetry.wandb, None),
    )
    for key, value, only in reserved:
        if value != only:
            shown = "null" if only is None else str(only).lower()
            raise ValueError(f"{key}={value} is not available in this version; leave it at {shown}")


def _world_size(config: Config, env: Env, gpus: int) -> int:
    if env.has_launcher:
        return env.world_size
    if config.launch.processes is not None:
        return config.launch.processes
    return gpus or smallest_world(config.parallel.sizes, config.rollout.tensor)


def _check_moe(config: Config, shape: ModelShape) -> None:
    moe = config.moe
    for key, value in (("aux_loss", moe.aux_loss), ("z_loss", moe.z_loss), ("bias_update_rate", moe.bias_update_rate)):
        if value and not shape.is_moe:
            raise ValueError(f"moe.{key}={value}, but the model ({shape.family}) has no experts; set it to 0")
        if value and shape.bridge is not None:
            raise ValueError(
                f"moe.{key}={value}, but {shape.family} has no table, so its routers are Megatron-Bridge's, which are "
                "asked for nothing; set it to 0"
            )
    if moe.bias_update_rate and not shape.router.expert_bias:
        raise ValueError(
            f"moe.bias_update_rate={moe.bias_update_rate}, but the routers of {shape.family} have no bias to move; "
            "set it to 0 and give moe.aux_loss a coefficient"
        )


def _check_world(config: Config, world: int, env: Env) -> None:
    sizes = config.parallel.sizes
    fits = smallest_world(sizes, config.rollout.tensor)
    for product, names in (
        (sizes.dense, "tensor x pipeline x context"),
        (sizes.sparse, "expert_tensor x expert x pipeline"),
        (config.rollout.tensor, "rollout.tensor"),
    ):
        if world % product:
            origin = "torchrun's WORLD_SIZE" if env.has_launcher else "launch.processes"
            raise ValueError(
                f"{origin}={world} is not divisible by {names} = {product}; use a multiple of {fits} processes"
            )


def _check_algorithm(config: Config) -> None:
    algorithm = config.algorithm
    for key, known in (
        ("advantage", ADVANTAGES),
        ("loss", LOSSES),
        ("aggregation", AGGREGATIONS),
        ("correction", CORRECTIONS),
    ):
        if (name := getattr(algorithm, key)) not in known:
            raise ValueError(f"algorithm.{key}={name!r} is unknown; there are: {', '.join(known)}")
        if name in NOT_IN_THE_LOOP:
            raise ValueError(f"algorithm.{key}={name} needs {NOT_IN_THE_LOOP[name]}, which this version does not make")
        if isinstance(known, Mapping):
            _check_options(f"algorithm.{key}", name, getattr(algorithm, f"{key}_options"), known[name])
    _check_options(
        "algorithm.select", f"loss={algorithm.loss}", algorithm.token_selection_options, SELECT.get(algorithm.loss, ())
    )
    if config.stage != "rl":
        return
    compared = algorithm.advantage in GROUP_ADVANTAGES and algorithm.advantage_options.get("singleton") != "raw"
    has_steps = algorithm.advantage == "grpo_process" and any(reward.name == "process" for reward in config.rewards)
    if config.rollout.samples_per_prompt == 1 and compared and not has_steps:
        raise ValueError(
            f"rollout.samples_per_prompt=1 with advantage={algorithm.advantage} makes every advantage zero, as a "
            "sample is compared with its own group; use 2 or more, or algorithm.preset=reinforce_pp"
        )
    if algorithm.loss == "sft":
        raise ValueError("algorithm.loss=sft is for stage: sft; use ppo_clip with stage: rl")
    _check_bounds(algorithm)
    _check_objective(config)
    # the trainer recomputes log-probs over the whole vocabulary; a sampler that cut it off used another distribution
    for key, off in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
        if (value := getattr(config.rollout, key)) not in (off, 0 if key == "top_k" else off):
            raise ValueError(
                f"rollout.{key}={value} is refused in training: the engine would sample from a truncated distribution "
                f"whose log-probs the trainer cannot reproduce; set it to {off}"
            )


def _check_bounds(algorithm: Algorithm) -> None:
    """A bound that is given acts, or is refused."""
    takes = CLIPS.get(algorithm.loss, {})
    for key in ("clip_low", "clip_high", "dual_clip"):
        if getattr(algorithm, key) is not None and key not in takes:
            raise ValueError(
                f"algorithm.{key}={getattr(algorithm, key)}, but loss={algorithm.loss} has no such bound "
                f"(it has {' and '.join(takes) or 'none'}); remove it"
            )
        if key in algorithm.loss_options:
            raise ValueError(f"algorithm.loss_options.{key} is a setting of its own; write algorithm.{key}")


def _check_objective(config: Config) -> None:
    """Settings that contradict one another."""
    algorithm, kl = config.algorithm, config.algorithm.kl
    if algorithm.use_rollout_logprobs and algorithm.correction != "none":
        raise ValueError(
            "algorithm.use_rollout_logprobs=true puts the gap between engine and trainer into the loss's ratio, and "
            f"correction={algorithm.correction} would count it again; set algorithm.correction=none"
        )
    uneven = (kl.where == "reward" and kl.coef > 0) or algorithm.advantage == "grpo_process"
    if algorithm.loss == "gspo" and algorithm.advantage in TOKEN_ADVANTAGES and uneven:
        raise ValueError(
            f"algorithm.loss=gspo takes one advantage a row, and advantage={algorithm.advantage} with kl.where="
            f"{kl.where} gives one a token; use advantage=grpo, or loss=ppo_clip"
        )
    if algorithm.advantage == "grpo_process" and kl.where == "reward" and kl.coef > 0:
        raise ValueError(
            "algorithm.advantage=grpo_process looks at rewards where a step ends, and would lose most of the KL that "
            "kl.where=reward puts on every token; set kl.where=loss"
        )
    if kl.target is not None and kl.coef == 0:
        raise ValueError(f"algorithm.kl.target={kl.target} adapts a coefficient of 0, which stays 0; give kl.coef")
    if kl.importance_weighted and kl.where == "reward":
        raise ValueError(
            "algorithm.kl.importance_weighted=true is about KL in the loss; set it to false, or kl.where=loss"
        )
    if kl.estimator == "k1" and kl.where == "loss" and kl.coef > 0 and not kl.importance_weighted:
        raise ValueError("algorithm.kl.estimator=k1 in the loss has an expected gradient of 0; use k2 or k3+")
    if algorithm.reward_clip is not None and not algorithm.reward_clip[0] < algorithm.reward_clip[1]:
        raise ValueError(f"algorithm.reward_clip={list(algorithm.reward_clip)} must rise, as [-5, 5]")
    if algorithm.reward_clip_stage == "normalised" and not algorithm.normalise_rewards:
        raise ValueError(
            "algorithm.reward_clip_stage=normalised, but normalise_rewards=false; use raw, or normalise_rewards=true"
        )
    if algorithm.overlong.buffer > config.rollout.max_tokens:
        raise ValueError(
            f"algorithm.overlong.buffer={algorithm.overlong.buffer:g} exceeds rollout.max_tokens="
            f"{config.rollout.max_tokens}; lower it (below 1 it is a share of max_tokens)"
        )


def _check_options(key: str, name: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := next((option for option in given if option not in known), None):
        near = get_close_matches(unknown, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known) or 'none'}; remove it"
        raise ValueError(f"{key}_options.{unknown} is no option of {key}={name}; {hint}")


def _check_rewards(config: Config) -> None:
    if not config.rewards:
        raise ValueError("rewards is empty, so nothing can be learned; name one, as rewards: [{name: accuracy}]")
    if not any(reward.weight for reward in config.rewards):
        raise ValueError("every weight in rewards is 0, so nothing can be learned; give one a weight")


def _check_lengths(config: Config, shape: ModelShape) -> None:
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_tokens
    sums = f"rollout.max_prompt_tokens + max_tokens = {rollout.max_prompt_tokens} + {rollout.max_tokens} = {longest}"
    if rollout.max_model_len is not None and longest > rollout.max_model_len:
        raise ValueError(f"{sums} exceeds rollout.max_model_len={rollout.max_model_len}; lower one or raise the limit")
    if (limit := rollout.max_model_len or longest) > shape.max_position:
        what = f"rollout.max_model_len={limit}" if rollout.max_model_len else sums
        raise ValueError(f"{what} exceeds the model's max_position={shape.max_position}; lower it")


def _check_train(config: Config, gpus: int) -> None:
    train = config.train
    if train.updates_per_step > train.prompts_per_step:
        raise ValueError(
            f"train.updates_per_step={train.updates_per_step} exceeds prompts_per_step={train.prompts_per_step}, "
            "and the samples of a prompt stay together; lower it"
        )
    if train.optimizer_cpu_offload and not gpus:
        raise ValueError(
            "train.optimizer_cpu_offload=true needs a GPU: on a CPU the optimizer is on the host; remove it"
        )
    if train.min_lr > train.lr:
        raise ValueError(f"train.min_lr={train.min_lr} exceeds lr={train.lr}; lower it")
    if not all(0 <= beta < 1 for beta in train.betas):
        raise ValueError(f"train.betas={list(train.betas)} must each be at least 0 and below 1, as [0.9, 0.95]")


def _check_resume(config: Config) -> None:
    resume = config.checkpoint.resume
    if resume in ("auto", "never"):
        return
    if not Path(resume).is_dir():
        raise FileNotFoundError(
            f"checkpoint.resume={resume} is not a folder; use auto, never, or a checkpoint's folder"
        )
    if not (Path(resume) / "metadata.json").is_file():
        raise FileNotFoundError(
            f"checkpoint.resume={resume} holds no metadata.json, so it is no checkpoint; use auto, never, or a "
            "checkpoint's folder, whose name ends as step_100"
        )


def _warnings(config: Config, shape: ModelShape, layout: Layout, rows: int, longest: int) -> Iterator[str]:
    train = config.train
    if shape.mtp_layers:
        yield (
            f"num_nextn_predict_layers={shape.mtp_layers}: layers of multi-token prediction are neither trained nor "
            "synced, and a checkpoint or an exported model holds none"
        )
    if config.algorithm.advantage == "grpo_process" and all(reward.name != "process" for reward in config.rewards):
        yield "algorithm.advantage=grpo_process without the reward `process` has one step a response: it is grpo"
    if longest > train.max_tokens_per_microbatch:
        yield (
            f"a row may be {longest} tokens, more than train.max_tokens_per_microbatch="
            f"{train.max_tokens_per_microbatch}: such rows get a micro-batch of their own, which may need more memory"
        )
    per_update = rows // train.updates_per_step
    if per_update < layout.dp.size:
        yield f"an update has {per_update} rows for {layout.dp.size} data-parallel ranks: some will idle"
    if train.warmup_steps >= train.steps > 0:
        yield f"train.warmup_steps={train.warmup_steps} lasts for all {train.steps} steps: lr is never reached"
