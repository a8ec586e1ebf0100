"""The context of one rank: process group, parallel coordinates, model shape, tokenizer, telemetry.

Every rank must call the same functions of run/ in the same order, because creating engines and
process groups is a collective.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.config.schema import Config
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.layout import Layout
from megarl.models.hub import model_folder
from megarl.models.registry import read_model
from megarl.models.shape import ModelShape
from megarl.platform.device import gpu_uuids, pick_device
from megarl.platform.env import Env, get_env, is_interactive, set_env
from megarl.processes.exit_codes import CurrentPhase
from megarl.processes.heartbeat import make_store
from megarl.telemetry.gpus import open_gpus
from megarl.telemetry.log import NodeTelemetry, Telemetry, Timeline
from megarl.telemetry.profile import open_profiler
from megarl.weights.sync.transports import Transport
from megarl.weights.sync.transports.collective import Collective


@dataclass(frozen=True)
class RankContext:
    """The context of one rank: config, parallel coordinates, model shape, tokenizer, transport."""

    config: Config
    env: Env
    device: torch.device
    layout: Layout
    model_folder: Path
    shape: ModelShape
    tokenizer: Tokenizer
    transport: Transport
    phase: CurrentPhase

    @classmethod
    def of(
        cls,
        config: Config,
        env: Env,
        device: torch.device,
        phase: CurrentPhase | None = None,
        layout: Layout | None = None,
    ) -> "RankContext":
        """Builds the context. With several ranks, torch.distributed must be initialised.

        `layout` defaults to the layout of `env.rank` among `env.world_size` ranks. Raises
        ValueError if model.revision differs between nodes.
        """
        assert config.model.path is not None, "the launcher must set model.path"
        transport = Transport()
        if env.world_size > 1:
            transport = Collective(timeout_s=config.launch.timeout_s)
        commits = set(transport.gather(config.model.revision))
        if len(commits) > 1:
            raise ValueError(
                f"model.revision is {' and '.join(sorted(commits))} on different nodes; "
                "set it to one"
            )
        folder = model_folder(config.model.path, config.model.revision)
        return cls(
            config,
            env,
            device,
            layout or Layout.of(config.parallel.sizes, env.world_size, env.rank),
            folder,
            read_model(folder),
            load_tokenizer(
                folder,
                trust_remote_code=config.model.trust_remote_code,
                template=config.task.template,
                stop=config.rollout.stop,
            ),
            transport,
            phase or CurrentPhase(),
        )


@contextmanager
def open_rank(
    config: Config, env: Env, phase: CurrentPhase, store: Any = None
) -> Iterator[RankContext]:
    """Initialises torch.distributed and yields this rank's context.

    Destroys the process group on success only: after a failure, peers may be gone. If `store` is
    None, uses the rendezvous of the launcher.
    """
    device = pick_device(env.local_rank)
    timeout = timedelta(seconds=config.launch.timeout_s)
    backend = "gloo"
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        # Megatron's groups only use NCCL: do not connect their ranks over gloo as well
        set_env(TORCH_GLOO_LAZY_INIT=1)
        if config.rollout.sleep_level:
            # as vLLM sets it: registered CUDA graphs would stay on the device in sleep; NCCL reads
            # it before vLLM starts
            set_env(NCCL_GRAPH_REGISTER=get_env("NCCL_GRAPH_REGISTER", "0"))
    if store is None and (env.launched or not env.has_launcher):
        store = make_store(env, timeout)
    dist.init_process_group(
        backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout
    )
    yield RankContext.of(config, env, device, phase)
    dist.destroy_process_group()


def rank_telemetry(
    rank: RankContext, start: int, world_size: int | None = None, **recorders: Any
) -> closing[Telemetry | NodeTelemetry]:
    """Returns a context manager that yields the run's telemetry and closes it on exit.

    `start` is the number of steps already done; `world_size` defaults to that of `rank.env`,
    `recorders` are arguments of NodeTelemetry. Rank 0 records metrics, the first rank of each node
    its timeline and GPUs.
    """
    config = rank.config
    env = rank.env
    folder = config.run_dir
    node = env.rank // env.local_world_size
    if env.world_size > env.local_world_size:
        recorders["gather"] = rank.transport.gather
    if rank.device.type == "cuda" and env.local_rank == 0:
        recorders["gpus"] = open_gpus(gpu_uuids(env.local_world_size))
    profile = config.telemetry.profile
    if profile and env.rank in profile.ranks:
        file = folder / f"profile_rank{env.rank}.json"
        recorders["profiler"] = open_profiler(file, *profile.steps, start)
    if env.rank:
        timeline = None
        if env.local_rank == 0:
            timeline = Timeline(folder / f"timeline_node{node}.json", node)
        return closing(NodeTelemetry(timeline, **recorders))
    return closing(
        Telemetry(
            config,
            start=start,
            interactive=is_interactive(),
            facts={"world_size": world_size or env.world_size, "layout": str(rank.layout)},
            **recorders,
        )
    )
