"""Checks a config before any process starts; every error is one line with the values and the
remedy.

    Config, Env --check_config--> Job (world size, layout, model shape, warnings) | ValueError

Each check is defined next to its section; this module calls them in order. It does not import
torch, so errors appear within a second. Checks that import a task or a reward are in
megarl.commands.preflight.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from megarl.config.algorithm import check_algorithm
from megarl.config.checkpoint import check_resume
from megarl.config.dpo import check_dpo_section
from megarl.config.iterative import check_model_reward
from megarl.config.launch import (
    check_topology,
    fallbacks,
    fleet_of,
    smallest_trainer,
)
from megarl.config.library_options import check_library_options
from megarl.config.lora import check_lora
from megarl.config.model import check_model
from megarl.config.moe import check_moe
from megarl.config.other_models import check_critic, check_frozen
from megarl.config.precision import check_products, check_rollout_format
from megarl.config.random_model import hf_config
from megarl.config.reward_model import check_reward_model
from megarl.config.rewards import check_rewards
from megarl.config.rollout import (
    check_cpu_engine,
    check_engine_layout,
    check_lengths,
    check_routing,
    check_sampling,
)
from megarl.config.schema import Config
from megarl.config.stages import STAGES, needs_engine
from megarl.config.task import check_problems
from megarl.config.telemetry import check_profile
from megarl.config.train import check_train
from megarl.layout import Fleet, Layout
from megarl.models.hub import is_hub_id, model_folder
from megarl.models.registry import parse_model, read_model
from megarl.models.shape import ModelShape
from megarl.platform.env import Env, count_gpus, has_bf16_products


@dataclass(frozen=True)
class Job:
    """The sizes of a job, derived from a config on this machine."""

    world: int  # number of ranks on all nodes
    gpus: int  # GPUs on this node; 0: CPU
    layout: Layout  # layout of this rank, or rank 0 before launch
    replicas: int  # engine replicas
    model: ModelShape
    rows: int  # samples per step
    longest_row: int  # maximum tokens of prompt and response together
    warnings: tuple[str, ...]
    memory: str = ""  # what was planned or not checked, if it was planned at all


def check_config(config: Config, env: Env, *, command: str = "train", is_dry: bool = False) -> Job:
    """Checks the config for `command`; returns the sizes of the job, with warnings. With `is_dry`,
    launch.gpu counts as a GPU of this machine.

    Raises ValueError or FileNotFoundError, with a one-line message, for an invalid config.
    """
    rollout = config.rollout
    shape = model_shape(config)
    own_gpus = count_gpus()
    gpus = own_gpus or int(is_dry and config.launch.gpu is not None)
    is_split = config.launch.is_split
    world = config.launch.processes or (0 if is_split else own_gpus) or smallest_trainer(config)
    if env.has_launcher:
        world = env.world_size
    check_topology(config, env, shape, command)
    has_engine = needs_engine(config.stage, command)
    check_engine_layout(config, shape)
    check_model(config, shape)
    check_moe(config, shape)
    check_routing(config, shape, gpus)
    if has_engine and not gpus and not is_split:
        # engines of the split topology may be on another machine: split.entry checks them
        check_cpu_engine(config, shape)
    if has_engine:
        check_rollout_format(config, shape, gpus)
    check_products(config, shape, gpus)
    fleet = fleet_of(config, world)
    layout = fleet.trainer_layout(min(env.rank, world - 1))
    _check_learning(config, shape, has_engine=has_engine)
    check_lengths(config, shape)
    check_train(config, shape, gpus)
    check_resume(config)
    check_profile(config, world)
    unsafe = tuple(check_library_options(config))
    for number, fallback in enumerate(fallbacks(config)):
        try:
            check_config(fallback, env, command=command, is_dry=is_dry)
        except ValueError as error:
            raise ValueError(f"launch.fallback_layouts[{number}]: {error}") from None
    rows = config.train.prompts_per_step
    if config.stage_spec.needs_engine:
        rows *= rollout.samples_per_prompt
    longest = rollout.max_prompt_tokens + rollout.max_tokens
    warnings = (*_warnings(config, shape, fleet, rows, longest, gpus), *unsafe)
    return Job(world, own_gpus, layout, fleet.replicas, shape, rows, longest, warnings)


def _check_learning(config: Config, shape: ModelShape, *, has_engine: bool) -> None:
    """Raises ValueError for contradictory settings of data, objective, models or rewards."""
    check_problems(config)
    check_algorithm(config)
    if config.stage_spec.needs_engine:
        check_sampling(config)
    check_lora(config, shape, has_engine=has_engine)
    check_critic(config, shape)
    check_reward_model(config, shape)
    check_dpo_section(config)
    check_model_reward(config)
    config.stage_spec.check(config)
    check_frozen(config, shape)
    if has_engine:
        check_rewards(config)


def model_shape(config: Config) -> ModelShape:
    """Returns the shape of the model to train, from model.path or model.create.

    Raises ValueError if both or neither is set, or for a revision without a hub id.
    """
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
            "no model is set; set model.path to a Hugging Face model's folder or hub id, or "
            "model.create"
        )
    return parse_model(hf_config(model.create), "model.create")


def _warnings(
    config: Config, shape: ModelShape, fleet: Fleet, rows: int, longest: int, gpus: int
) -> Iterator[str]:
    train = config.train
    if train.dtype == "bf16" and not gpus and not has_bf16_products():
        yield (
            "train.dtype=bf16 on a CPU without bf16 instructions is slower than fp32; "
            "set train.dtype=fp32"
        )
    yield from _unread(config)
    if shape.mtp_layers:
        yield (
            f"num_nextn_predict_layers={shape.mtp_layers}: multi-token prediction layers are not "
            "trained, synced, saved or exported"
        )
    scores_steps = any(reward.name in ("process", "model") for reward in config.rewards)
    if config.algorithm.advantage == "grpo_process" and not scores_steps:
        yield (
            "algorithm.advantage=grpo_process without the reward `process` has one step per "
            "response: it equals grpo"
        )
    if longest > train.max_tokens_per_microbatch:
        yield (
            f"rows of up to {longest} tokens exceed train.max_tokens_per_microbatch="
            f"{train.max_tokens_per_microbatch}: each forms its own micro-batch and may need more "
            "memory"
        )
    per_update = rows // train.updates_per_step
    data = fleet.trainer_layout(0).dp.size
    if per_update < data:
        yield (f"an update has {per_update} rows for {data} data-parallel ranks: some will be idle")
    if train.warmup_steps >= train.steps > 0:
        yield (
            f"train.warmup_steps={train.warmup_steps} covers all {train.steps} steps: train.lr is "
            "never reached"
        )


def _unread(config: Config) -> Iterator[str]:
    """Yields a warning for each section with settings that only other stages use."""
    sections = set(chain.from_iterable(stage.sections for stage in STAGES.values()))
    unread = sections.difference(config.stage_spec.sections)
    for key, values in config.model_dump(include=unread, exclude_defaults=True).items():
        stages = [name for name, stage in STAGES.items() if key in stage.sections]
        yield (
            f"{key}.{next(iter(values))} has no effect in stage: {config.stage}; it is for stage: "
            f"{' or '.join(stages)}"
        )
