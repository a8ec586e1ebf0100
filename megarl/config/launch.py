"""Sections `run` and `launch`: a run's name, processes and topology, and their checks."""

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
    """Output folder and seed of a run."""

    name: str = Field(default="run", pattern=NAME, max_length=200)
    """Name of the run and of its folder."""
    dir: str = "runs"
    """Parent folder of all runs."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of sampling and of all random numbers in training."""


class FallbackLayout(Section):
    """A layout with fewer ranks, used after the loss of a node."""

    processes: PositiveInt
    """Number of trainer ranks."""
    parallel: ParallelSizes = ParallelSizes()
    """Parallel sizes of the trainer."""


class Launch(Section):
    """Processes, time limits, and restarts after failures."""

    topology: Literal["colocated", "split"] = "colocated"
    """Placement of trainer and engine: on the same devices, or on separate ones (Ray)."""
    processes: PositiveInt | None = None
    """Number of ranks on all nodes, or of trainer ranks in the split topology; null: all GPUs, or
    on a CPU the smallest number that fits the layout. Ignored under torchrun: WORLD_SIZE counts."""
    processes_per_node: PositiveInt | None = None
    """Number of ranks per node, or GPUs per node of an existing Ray cluster; null:
    LOCAL_WORLD_SIZE in a run, 8 in a plan of more than 8 and in the split topology."""
    gpu: Literal["h100", "h200", "b200"] | None = None
    """GPU for which memory is checked before a rank starts, here or in a dry run elsewhere; null:
    the GPU of this machine. Configs of more than 8 processes must set it."""
    timeout_s: PositiveInt = 600
    """Time limit of collectives, in seconds. The limit is 0.9 of this value for a silent rank, and
    half of it for a stopped or stuck rank."""
    max_restarts: NonNegativeInt = 3
    """Split topology: maximum number of restarts in total, of lost engines and of the trainer from
    its last checkpoint; beyond it, the run ends with exit code 3."""
    fallback_layouts: tuple[FallbackLayout, ...] = ()
    """Split topology: layouts that replace `processes` and `parallel` after the loss of a node; the
    first layout that fits is used."""
    dashboard: bool = False
    """Split topology: starts Ray's dashboard, on the loopback interface of this machine."""

    @property
    def is_split(self) -> bool:
        return self.topology == "split"


def check_topology(config: Config, env: Env, shape: ModelShape, command: str) -> None:
    """Raises ValueError for settings that the split topology does not support, or that only the
    split topology supports.
    """
    if not config.launch.is_split:
        usual = type(config)()
        for key in SPLIT_ONLY.split():
            value = attrgetter(key)(config)
            if value != attrgetter(key)(usual):
                raise ValueError(
                    f"{key}={value} is for launch.topology=split; remove it, or set the topology"
                )
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
    """Returns the smallest number of trainer ranks that fits the layouts of trainer and engine."""
    replica = 1 if config.launch.is_split else config.rollout.ranks_per_replica
    return smallest_world(config.parallel.sizes, replica)


def fleet_of(
    config: Config, trainers: int | None = None, *, ranks_per_node: int = RANKS_PER_NODE
) -> Fleet:
    """Returns the ranks of trainer and engines.

    `trainers` defaults to launch.processes, or else the smallest number that fits.
    `ranks_per_node` applies if launch.processes_per_node is null. Raises ValueError if the number
    of ranks does not fit the layouts.
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
    node = per_node or ranks_per_node
    tensor = rollout.tensor
    spans = launch.is_split and replica > node
    if spans and (replica % node or (tensor % node and node % tensor)):
        raise ValueError(
            f"an engine of rollout.tensor x data = {tensor} x {rollout.data} ranks does not fill "
            f"nodes of {node} (launch.processes_per_node; 8 if null); let rollout.tensor divide a "
            "node or be a multiple of it, and tensor x data a multiple"
        )
    return Fleet(
        parallel=config.parallel.sizes,
        trainers=trainers,
        tensor=tensor,
        ranks_per_replica=replica,
        replicas=replicas,
        expert=rollout.expert,
        ranks_per_node=node,
        is_split=launch.is_split,
    )


def fallbacks(config: Config) -> list[Config]:
    """Returns one config for each of launch.fallback_layouts, in order."""
    configs = []
    for layout in config.launch.fallback_layouts:
        values = {"processes": layout.processes, "fallback_layouts": ()}
        launch = config.launch.model_copy(update=values)
        configs.append(config.model_copy(update={"launch": launch, "parallel": layout.parallel}))
    return configs
