"""Checks a config before any process starts; every error is one line with the values and the remedy.

    Config, Env --check_config--> Job (world arithmetic, model shape, warnings) | ValueError

Without torch, so a mistake surfaces in a second. Checks that import a task or a reward are in megarl.launch.preflight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from megarl.config import model_checks, names
from megarl.config.library_options import check_library_options
from megarl.config.names import ENGINE_STAGES
from megarl.config.presets import PRESETS
from megarl.config.random_model import hf_config
from megarl.config.schema import Algorithm, Config, Task
from megarl.config.section import did_you_mean, refuse
from megarl.layout import Layout, smallest_world
from megarl.models.hub import is_hub_id, model_folder
from megarl.models.registry import parse_model, read_model
from megarl.models.shape import ModelShape
from megarl.platform.env import Env, count_gpus, has_bf16_products

ENGINE_COMMANDS = ("eval", "parity", "sync")  # that start an engine whatever the stage is
SPLIT_ONLY = (
    "rollout.replicas", "rollout.max_staleness", "rollout.update_in_flight", "launch.dashboard", "launch.max_restarts",
    "launch.fallback_layouts",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """Sizes derived from a config on this machine."""

    world: int  # processes on all nodes
    gpus: int  # on this node; 0: CPU
    layout: Layout  # of rank 0
    replicas: int  # of the engine
    model: ModelShape
    rows: int  # samples per step
    longest_row: int  # tokens, prompt and response
    warnings: tuple[str, ...]


def check_config(config: Config, env: Env, *, command: str = "train") -> Job:
    """Raises ValueError or FileNotFoundError with a one-line message."""
    has_engine = config.stage in ENGINE_STAGES or command in ENGINE_COMMANDS
    if (expert := config.rollout.expert) > 1:
        raise ValueError(f"rollout.expert={expert} is not available in this version; leave it at 1")
    shape = model_shape(config)
    gpus, is_split = count_gpus(), config.launch.topology == "split"
    smallest = smallest_world(config.parallel.sizes, 1 if is_split else config.rollout.tensor)
    world = (
        env.world_size
        if env.has_launcher
        else config.launch.processes or (0 if is_split else gpus) or smallest
    )
    _check_topology(config, env, shape, command)
    model_checks.check_model(config, shape)
    _check_moe(config, shape)
    model_checks.check_router_replay(config, shape, gpus)
    if gpus:
        model_checks.check_gpu_trainer(config, shape)
    elif has_engine and not is_split:  # whose engines may be on another machine: launch.run_split
        model_checks.check_cpu_engine(config, shape)
    if has_engine:
        model_checks.check_fp8_rollout(config, shape, gpus)
    model_checks.check_fp8_training(config, shape, gpus)
    _check_world(config, world, smallest, env)
    layout = Layout.of(config.parallel.sizes, world, rank=min(env.rank, world - 1))
    _check_problems(config)
    _check_algorithm(config)
    model_checks.check_lora(config, shape, has_engine=has_engine)
    model_checks.check_critic(config, shape)
    model_checks.check_reward_model(config, shape)
    _check_preferences(config)
    model_checks.check_frozen(config, shape)
    if (
        has_engine
        and not any(reward.weight for reward in config.rewards)
        and not config.algorithm.distill_coef
    ):
        raise ValueError(
            "rewards is empty, or every weight is 0; add one, e.g. rewards: [{name: accuracy}]"
        )
    model_checks.check_iterative(config)
    _check_lengths(config, shape)
    _check_train(config, gpus)
    unsafe = tuple(check_library_options(config))
    for number, fallback in enumerate(fallbacks(config)):
        try:
            check_config(fallback, env, command=command)
        except ValueError as error:
            raise ValueError(f"launch.fallback_layouts[{number}]: {error}") from None
    rows = config.train.prompts_per_step * (
        config.rollout.samples_per_prompt if config.stage in ENGINE_STAGES else 1
    )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    return Job(
        world=world,
        gpus=gpus,
        layout=layout,
        replicas=config.rollout.replicas or 1 if is_split else world // config.rollout.tensor,
        model=shape,
        rows=rows,
        longest_row=longest,
        warnings=(*_warnings(config, shape, layout, rows, longest, gpus), *unsafe),
    )


def model_shape(config: Config) -> ModelShape:
    """Returns the shape of the model to train, from model.path or model.create."""
    model = config.model
    if model.path is not None and model.create is not None:
        raise ValueError(f"model.path={model.path} and model.create are both set; keep one")
    if model.revision is not None and (model.path is None or not is_hub_id(model.path)):
        where = "model.create" if model.path is None else f"model.path={model.path}"
        raise ValueError(
            f"model.revision={model.revision} applies to a hub id, not to {where}; remove it"
        )
    if model.path is not None:
        return read_model(model_folder(model.path, model.revision))
    if model.create is None:
        raise ValueError(
            "no model is set; set model.path to a Hugging Face model's folder or hub id, or model.create"
        )
    return parse_model(hf_config(model.create), "model.create")


def fallbacks(config: Config) -> list[Config]:
    """The configs of launch.fallback_layouts, in their order."""
    configs = list[Config]()
    for layout in config.launch.fallback_layouts:
        launch = config.launch.model_copy(
            update={"processes": layout.processes, "fallback_layouts": ()}
        )
        configs.append(config.model_copy(update={"launch": launch, "parallel": layout.parallel}))
    return configs


def _check_topology(config: Config, env: Env, shape: ModelShape, command: str) -> None:
    """Refuses what the split topology does not do, and what only it does."""
    if config.launch.topology == "colocated":
        usual, remedy = Config(), "launch.topology=split; remove it, or set the topology"
        getters = {key: attrgetter(key) for key in SPLIT_ONLY}
        return refuse(
            {
                f"{key}={of(config)} is for {remedy}": of(config) != of(usual)
                for key, of in getters.items()
            }
        )
    remedy, train, rollout = "set launch.topology=colocated", config.train, config.rollout
    what = f"`megarl {command}`" if command != "train" else f"stage={config.stage}"
    not_split = "is not available with launch.topology=split; leave it at none, or"
    shared = "frees a GPU for the other side, but launch.topology=split shares none; unset it"
    problems = {
        f"launch.topology=split is started by Ray, not by torchrun; run `megarl train`, or {remedy}": env.has_launcher,
        f"launch.topology=split is for `megarl train` with stage: rl, not for {what}; {remedy}": (
            command != "train" or config.stage != "rl"
        ),
        f"launch.topology=split does not support {shape.family}, which has no table; {remedy}": shape.bridge,
        f"rewards: name='model' scores on the trainer's ranks, which launch.topology=split does not; {remedy}, or "
        "serve the model (`megarl serve-reward`) and give its URL": any(
            x.name == "model" for x in config.rewards
        ),
        f"rollout.quantization={rollout.quantization} {not_split} {remedy}": rollout.quantization
        != "none",
        f"rollout.router_replay={rollout.router_replay} {not_split} {remedy}": rollout.router_replay
        != "none",
        f"train.offload={list(train.offload)} {shared}": train.offload,
        f"rollout.sleep_level={rollout.sleep_level} {shared}": rollout.sleep_level,
    }
    refuse(problems)


def _check_moe(config: Config, shape: ModelShape) -> None:
    for key, value in config.moe.model_dump(
        include={"aux_loss", "z_loss", "bias_update_rate"}
    ).items():
        if value and not shape.is_moe:
            raise ValueError(
                f"moe.{key}={value}, but the model ({shape.family}) has no experts; set it to 0"
            )
        if value and shape.bridge is not None:
            raise ValueError(
                f"moe.{key}={value} is not supported for {shape.family} on Megatron-Bridge; set it to 0"
            )
    if (rate := config.moe.bias_update_rate) and not shape.router.expert_bias:
        problem = f"the routers of {shape.family} have no bias; set it to 0, and use moe.aux_loss"
        raise ValueError(f"moe.bias_update_rate={rate}, but {problem}")


def _check_world(config: Config, world: int, smallest: int, env: Env) -> None:
    engine = {} if config.launch.topology == "split" else {"rollout.tensor": config.rollout.tensor}
    for axes, product in (config.parallel.sizes.divisors | engine).items():
        if world % product:
            origin = "torchrun's WORLD_SIZE" if env.has_launcher else "launch.processes"
            raise ValueError(
                f"{origin}={world} is not divisible by {axes} = {product}; use a multiple of {smallest}"
            )
    per_node = config.launch.processes_per_node
    if per_node is not None and world > per_node and world % per_node:
        raise ValueError(
            f"launch.processes_per_node={per_node} does not divide the {world} processes; use a divisor"
        )


def _check_problems(config: Config) -> None:
    """Raises ValueError if the mixture or the evaluation sets contradict other settings."""
    for key in ("name", "options", "size") if config.task.mixture else ():
        if (value := getattr(config.task, key)) != getattr(Task(), key):
            raise ValueError(f"task.{key}={value} and task.mixture are both set; keep one")
    if config.eval.size == 0 and not config.eval.sets:
        raise ValueError(
            "eval.size=0 and eval.sets is empty, so there is nothing to evaluate; set one"
        )
    names_of_sets = [part.name for part in config.eval.sets]
    for part in config.eval.sets:
        problems = {
            f"eval.sets has two sets named {part.name}; rename one": names_of_sets.count(part.name)
            > 1,
            f"eval.sets: {part.name} has options={part.options}, but no task; set its task": (
                part.options and part.task is None
            ),
            f"eval.sets: {part.name} draws samples={part.samples} at temperature=0, which are all equal; set "
            "samples=1, or a temperature": part.samples > 1 and part.temperature == 0,
        }
        refuse(problems)


def _check_algorithm(config: Config) -> None:
    algorithm = config.algorithm
    functions = {
        "advantage": names.ADVANTAGES,
        "loss": names.LOSSES,
        "correction": names.CORRECTIONS,
    }
    for key, known in {"aggregation": names.AGGREGATIONS, **functions}.items():
        if (name := getattr(algorithm, key)) not in known:
            raise ValueError(
                f"algorithm.{key}={name!r} is unknown; choose from: {', '.join(known)}"
            )
        if isinstance(known, Mapping):
            _check_options(
                f"algorithm.{key}", name, getattr(algorithm, f"{key}_options"), known[name]
            )
    selectable = names.SELECT.get(algorithm.loss, ())
    _check_options(
        "algorithm.token_selection",
        f"loss={algorithm.loss}",
        algorithm.token_selection_options,
        selectable,
    )
    if config.stage not in ENGINE_STAGES:
        return
    is_relative = algorithm.advantage in names.GROUP_ADVANTAGES
    has_raw = algorithm.advantage_options.get("singleton") == "raw"
    scores_steps = any(reward.name in ("process", "model") for reward in config.rewards)
    has_steps = algorithm.advantage == "grpo_process" and scores_steps
    compares = config.stage in ("best_of_n", "iterative_dpo")  # which _check_preferences explains
    if (
        config.rollout.samples_per_prompt == 1
        and is_relative
        and not (has_raw or has_steps or compares)
    ):
        raise ValueError(
            f"rollout.samples_per_prompt=1 with advantage={algorithm.advantage} makes every advantage zero, "
            "because a sample is compared with its group; use 2 or more, or algorithm.preset=reinforce_pp"
        )
    if algorithm.loss == "sft":
        raise ValueError("algorithm.loss=sft is for stage: sft; use ppo_clip with stage: rl")
    _check_objective(config)
    for key, off in (("top_p", (1.0,)), ("top_k", (-1, 0)), ("min_p", (0.0,))):
        if (value := getattr(config.rollout, key)) not in off:
            raise ValueError(
                f"rollout.{key}={value} is not supported in training: its log-probs are over all tokens; set {off[0]}"
            )


def _check_preferences(config: Config) -> None:
    """Raises ValueError for settings that the stages dpo, iterative_dpo and best_of_n would ignore."""
    dpo, stage, epochs = config.dpo, config.stage, config.train.epochs_per_batch
    if dpo.label_smoothing and dpo.loss not in ("sigmoid", "robust"):
        raise ValueError(
            f"dpo.label_smoothing={dpo.label_smoothing} has no effect on dpo.loss={dpo.loss}; set it to 0"
        )
    if stage == "dpo" and dpo.reference == "previous":
        raise ValueError(
            "dpo.reference=previous needs rounds, which stage: dpo lacks; use stage: iterative_dpo"
        )
    if stage == "dpo" and epochs > 1:
        raise ValueError(
            f"train.epochs_per_batch={epochs} has no effect in stage: dpo; raise train.steps instead"
        )
    if stage not in ("iterative_dpo", "best_of_n"):
        return
    if config.rollout.samples_per_prompt == 1:
        raise ValueError(
            f"rollout.samples_per_prompt=1 leaves stage: {stage} nothing to compare; use 2 or more"
        )
    read = {"truncated", "truncated_reward", "overlong", "filter_zero_std", "max_refills"}
    unread = config.algorithm.model_dump(
        exclude=read | ({"aggregation"} if stage == "best_of_n" else set())
    )
    usual = [Algorithm().model_dump(), Algorithm.model_validate(PRESETS["grpo"]).model_dump()]
    for key, value in unread.items():
        if value not in [values[key] for values in usual]:
            raise ValueError(f"algorithm.{key}={value} has no effect in stage: {stage}; remove it")


def _check_objective(config: Config) -> None:
    """Raises ValueError for bounds that the loss would ignore, and for settings that contradict each other."""
    algorithm, kl = config.algorithm, config.algorithm.kl
    bounds = names.CLIPS.get(algorithm.loss, {})
    for key in names.LOSS_BOUNDS:
        if (value := getattr(algorithm, key)) is not None and key not in bounds:
            problem = (
                f"loss={algorithm.loss} has no such bound (it has {' and '.join(bounds) or 'none'})"
            )
            raise ValueError(f"algorithm.{key}={value}, but {problem}; remove it")
        if key in algorithm.loss_options:
            raise ValueError(
                f"algorithm.loss_options.{key} is a key of `algorithm` itself; write algorithm.{key}"
            )
    has_steps, has_kl_reward = (
        algorithm.advantage == "grpo_process",
        kl.where == "reward" and kl.coef > 0,
    )
    varies = (
        has_steps
        or algorithm.needs_critic
        or (algorithm.distill_coef > 0 and not algorithm.distill_top_k)
    )
    varies |= has_kl_reward and algorithm.advantage in names.TOKEN_ADVANTAGES
    num_updates = config.train.updates_per_step * config.train.epochs_per_batch
    reward_clip, buffer, max_tokens = (
        algorithm.reward_clip,
        algorithm.overlong.buffer,
        config.rollout.max_tokens,
    )
    problems = {
        "algorithm.use_rollout_logprobs=true already includes the mismatch with the engine in the loss's ratio, so "
        f"correction={algorithm.correction} would count it twice; "
        "set algorithm.correction=none": algorithm.use_rollout_logprobs
        and algorithm.correction != "none",
        f"algorithm.loss=gspo needs one advantage per response, but advantage={algorithm.advantage} with kl.where="
        f"{kl.where} computes one per token; use advantage=grpo, or loss=ppo_clip": algorithm.loss
        == "gspo"
        and varies,
        "algorithm.advantage=grpo_process reads rewards only at the ends of steps and would ignore most of the KL "
        "that kl.where=reward adds to every token; set kl.where=loss": has_steps and has_kl_reward,
        "algorithm.kl.against=old is 0 before the first update, where rewards are; set kl.where=loss": (
            kl.against == "old" and kl.where == "reward"
        ),
        "algorithm.kl.against=old has no effect with one update per batch, made at the old policy itself; raise "
        "train.epochs_per_batch or train.updates_per_step": kl.against == "old"
        and kl.coef > 0
        and num_updates == 1,
        f"algorithm.kl.target={kl.target} has no effect on kl.coef=0, which stays 0; set kl.coef": (
            kl.target is not None and kl.coef == 0
        ),
        "algorithm.kl.importance_weighted=true needs KL in the loss; "
        "set kl.where=loss, or unset it": kl.importance_weighted and kl.where == "reward",
        "algorithm.kl.estimator=k1 in the loss has an expected gradient of 0; use k2 or k3+": (
            kl.estimator == "k1"
            and kl.where == "loss"
            and kl.coef > 0
            and not kl.importance_weighted
        ),
        f"algorithm.reward_clip={list(reward_clip or ())} must be increasing, e.g. [-5, 5]": (
            reward_clip is not None and not reward_clip[0] < reward_clip[1]
        ),
        "algorithm.reward_clip_stage=normalised needs normalise_rewards=true; "
        "set it, or choose raw": algorithm.reward_clip_stage == "normalised"
        and not algorithm.normalise_rewards,
        f"algorithm.overlong.buffer={buffer:g} exceeds rollout.max_tokens={max_tokens}; lower it (below 1 it is a "
        "fraction of max_tokens)": buffer > max_tokens,
    }
    refuse(problems)


def _check_options(key: str, name: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := next((option for option in options if option not in known), None):
        remedy = did_you_mean(unknown, known, f"it takes {', '.join(known) or 'none'}; remove it")
        raise ValueError(f"{key}_options.{unknown} is not an option of {key}={name}; {remedy}")


def _check_lengths(config: Config, shape: ModelShape) -> None:
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_tokens
    sums = f"rollout.max_prompt_tokens + max_tokens = {rollout.max_prompt_tokens} + {rollout.max_tokens} = {longest}"
    if rollout.max_model_len is not None and longest > rollout.max_model_len:
        raise ValueError(
            f"{sums} exceeds rollout.max_model_len={rollout.max_model_len}; lower one or raise the limit"
        )
    if (limit := rollout.max_model_len or longest) > shape.max_position:
        size = f"rollout.max_model_len={limit}" if rollout.max_model_len else sums
        raise ValueError(f"{size} exceeds the model's max_position={shape.max_position}; lower it")


def _check_sft(config: Config) -> None:
    patience, evaluated, epochs = config.sft.patience, config.eval, config.train.epochs_per_batch
    if epochs > 1:
        raise ValueError(
            f"train.epochs_per_batch={epochs}, but each batch of stage: sft is new; raise train.steps"
        )
    if patience is not None and not evaluated.every:
        raise ValueError(
            f"sft.patience={patience} counts evaluations, but eval.every=0; set eval.every"
        )
    if evaluated.every and not evaluated.size:
        raise ValueError(
            f"eval.every={evaluated.every} with stage: sft needs held-out examples; set eval.size"
        )


def _check_train(config: Config, gpus: int) -> None:
    train = config.train
    if config.stage == "sft":
        _check_sft(config)
    problems = {
        f"train.updates_per_step={train.updates_per_step} exceeds prompts_per_step={train.prompts_per_step}, but the "
        "samples of a prompt must share an update; lower it": train.updates_per_step
        > train.prompts_per_step,
        "train.optimizer_cpu_offload=true needs a GPU; remove it": train.optimizer_cpu_offload
        and not gpus,
        f"train.optimizer_cpu_offload=true keeps the optimizer on the host, so train.offload={list(train.offload)} "
        "must not move it; "
        "remove optimizer from train.offload": train.optimizer_cpu_offload
        and "optimizer" in train.offload,
        f"train.min_lr={train.min_lr} exceeds lr={train.lr}; lower it": train.min_lr > train.lr,
        f"train.betas={list(train.betas)} must each be at least 0 and below 1, e.g. [0.9, 0.95]": not all(
            0 <= beta < 1 for beta in train.betas
        ),
    }
    refuse(problems)
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not (Path(resume) / "metadata.json").is_file():
        remedy = "use auto, never, or a folder such as checkpoints/step_100"
        raise FileNotFoundError(
            f"checkpoint.resume={resume} is not a checkpoint (no metadata.json); {remedy}"
        )


def _warnings(
    config: Config, shape: ModelShape, layout: Layout, rows: int, longest: int, gpus: int
) -> Iterator[str]:
    train = config.train
    if train.dtype == "bf16" and not gpus and not has_bf16_products():
        yield "train.dtype=bf16 on a CPU without bf16 instructions is slower than fp32; set train.dtype=fp32"
    if config.launch.topology == "split" and (size := config.rollout.tensor) > (
        config.launch.processes_per_node or 8
    ):
        yield f"rollout.tensor={size} needs a Ray node with {size} GPUs: engines that span nodes are not supported"
    for key, stages in names.STAGES_OF_SECTIONS.items():
        if config.stage not in stages and (part := getattr(config, key)) != (
            default := type(part)()
        ):
            name = next(name for name, value in part if value != getattr(default, name))
            yield f"{key}.{name} has no effect in stage: {config.stage}; it is for stage: {' or '.join(stages)}"
    if shape.mtp_layers:
        problem = "multi-token prediction layers are not trained, synced, saved or exported"
        yield f"num_nextn_predict_layers={shape.mtp_layers}: {problem}"
    scores_steps = any(reward.name in ("process", "model") for reward in config.rewards)
    if config.algorithm.advantage == "grpo_process" and not scores_steps:
        yield "algorithm.advantage=grpo_process without the reward `process` has one step per response: it equals grpo"
    if longest > train.max_tokens_per_microbatch:
        limit = f"train.max_tokens_per_microbatch={train.max_tokens_per_microbatch}"
        yield f"rows of up to {longest} tokens exceed {limit}: each forms its own micro-batch and may need more memory"
    per_update = rows // train.updates_per_step
    if per_update < layout.dp.size:
        yield f"an update has {per_update} rows for {layout.dp.size} data-parallel ranks: some will be idle"
    if train.warmup_steps >= train.steps > 0:
        yield f"train.warmup_steps={train.warmup_steps} covers all {train.steps} steps: train.lr is never reached"
