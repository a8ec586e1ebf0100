"""`run` and `launch`: the name of a run, its processes, and its topology."""

from operator import attrgetter
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megarl.config.model import ParallelSizes
from megarl.config.section import NAME, Config, Section, refuse
from megarl.layout import Fleet, smallest_world
from megarl.models.shape import ModelShape
from megarl.platform.env import Env

RANKS_PER_NODE = 8
SPLIT_ONLY = """
    rollout.replicas rollout.max_staleness rollout.update_in_flight
    launch.dashboard launch.max_restarts launch.fallback_layouts
"""


class RunSection(Section):
    """Where a run writes, and its seed."""

    name: str = Field(default="run", pattern=NAME, max_length=200)
    """Name of the run, and of its folder."""
    dir: str = "runs"
    """Folder of all runs."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of sampling, and of all that is drawn in training."""


class FallbackLayout(Section):
    """A layout of fewer ranks, for a run that has lost a node."""

    processes: PositiveInt
    """Ranks of the trainer."""
    parallel: ParallelSizes = ParallelSizes()
    """How they split the model."""


class Launch(Section):
    """Processes, time-outs, and what happens when one is lost."""

    topology: Literal["colocated", "split"] = "colocated"
    """Trainer and engine on the same devices, or on separate ones (Ray)."""
    processes: PositiveInt | None = None
    """Ranks on this node, or of the trainer in the split topology; null: all GPUs, or on a CPU the
    fewest that fit the layout."""
    processes_per_node: PositiveInt | None = None
    """Ranks of a node; null: LOCAL_WORLD_SIZE in a run, 8 in a plan of more than 8."""
    timeout_s: PositiveInt = 600
    """Time-out of collectives, in seconds; 0.9 of it for a silent rank, half of it for one that is
    stopped or stuck."""
    max_restarts: NonNegativeInt = 3
    """Restarts in all of a lost engine, or of the trainer from its last checkpoint, in the split
    topology; then exit code 3."""
    fallback_layouts: tuple[FallbackLayout, ...] = ()
    """Layouts that take the place of `processes` and `parallel` when a node is gone, in the split
    topology: the first that has room."""
    dashboard: bool = False
    """Starts Ray's dashboard, on this machine's loopback, in the split topology."""

    @property
    def is_split(self) -> bool:
        return self.topology == "split"


def check_topology(config: Config, env: Env, shape: ModelShape, command: str) -> None:
    """Refuses what the split topology does not do, and what only it does."""
    if not config.launch.is_split:
        usual = type(config)()
        remedy = "launch.topology=split; remove it, or set the topology"
        for key in SPLIT_ONLY.split():
            value = attrgetter(key)(config)
            if value != attrgetter(key)(usual):
                raise ValueError(f"{key}={value} is for {remedy}")
        return
    remedy = "set launch.topology=colocated"
    rollout = config.rollout
    what = f"`megarl {command}`" if command != "train" else f"stage={config.stage}"
    shared = "frees a GPU for the other side, but launch.topology=split shares none; unset it"
    refuse(
        (
            env.has_launcher,
            "launch.topology=split is started by Ray, not by torchrun; run `megarl train`, or "
            f"{remedy}",
        ),
        (
            command != "train" or not config.stage_spec.in_split,
            f"launch.topology=split is for `megarl train` with stage: rl, not for {what}; {remedy}",
        ),
        (
            shape.bridge,
            f"launch.topology=split does not support {shape.family}, which has no table; {remedy}",
        ),
        (
            any(reward.name == "model" for reward in config.rewards),
            "rewards: name='model' scores on the trainer's ranks, which launch.topology=split does "
            f"not; {remedy}, or serve the model (`megarl serve-reward`) and give its URL",
        ),
        (
            rollout.quantization != "none",
            f"rollout.quantization={rollout.quantization} is not available with "
            f"launch.topology=split; leave it at none, or {remedy}",
        ),
        (config.train.offload, f"train.offload={list(config.train.offload)} {shared}"),
        (rollout.sleep_level, f"rollout.sleep_level={rollout.sleep_level} {shared}"),
    )


def smallest_trainer(config: Config) -> int:
    """Returns the smallest number of trainer ranks that fits the layouts."""
    replica = 1 if config.launch.is_split else config.rollout.ranks_per_replica
    return smallest_world(config.parallel.sizes, replica)


def fleet_of(
    config: Config, trainers: int | None = None, *, ranks_per_node: int = RANKS_PER_NODE
) -> Fleet:
    """Returns the ranks of a run. Raises ValueError if their number does not fit the layouts.

    `trainers`: None: as `launch.processes`. `ranks_per_node` applies where
    `launch.processes_per_node` is null.
    """
    rollout = config.rollout
    launch = config.launch
    replica = rollout.ranks_per_replica
    trainers = trainers or launch.processes or smallest_trainer(config)
    divisors = dict(config.parallel.sizes.divisors)
    replicas = rollout.replicas or 1
    if not launch.is_split:
        divisors["ranks of an engine replica"] = replica
        replicas = trainers // replica
    for axes, product in divisors.items():
        if trainers % product:
            raise ValueError(
                f"{trainers} processes (launch.processes, or torchrun's WORLD_SIZE) are not "
                f"divisible by {axes} = {product}; use a multiple of {smallest_trainer(config)}"
            )
    per_node = launch.processes_per_node
    if per_node and trainers > per_node and trainers % per_node:
        raise ValueError(
            f"launch.processes_per_node={per_node} does not divide the {trainers} processes; "
            "use a divisor"
        )
    return Fleet(
        parallel=config.parallel.sizes,
        trainers=trainers,
        tensor=rollout.tensor,
        ranks_per_replica=replica,
        replicas=replicas,
        expert=rollout.expert,
        ranks_per_node=per_node or ranks_per_node,
        is_split=launch.is_split,
    )


def fallbacks(config: Config) -> list[Config]:
    """Returns the configs of launch.fallback_layouts, in their order."""
    configs = []
    for layout in config.launch.fallback_layouts:
        values = {"processes": layout.processes, "fallback_layouts": ()}
        launch = config.launch.model_copy(update=values)
        configs.append(config.model_copy(update={"launch": launch, "parallel": layout.parallel}))
    return configs
