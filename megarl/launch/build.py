"""Builds what every stage needs on one rank: the process group, the trainer, prompts, checkpoints, telemetry.

run_rl.py, run_sft.py and run_check.py build the rest. Every rank must call the same functions in the same order, since
engines and process groups are created by collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.checkpoint.hf import export_hf
from megarl.checkpoint.state import Checkpoints
from megarl.config.load import run_dir
from megarl.config.schema import Config, Task
from megarl.data.prompts import PromptStream
from megarl.data.tasks import Split, eval_task, load_sources
from megarl.data.tokenizer import Tokenizer, load_tokenizer, prompt_encoder
from megarl.launch.exit_codes import CurrentPhase
from megarl.launch.heartbeat import make_store
from megarl.layout import Layout
from megarl.models.hub import model_folder
from megarl.models.registry import fp32_tensors, read_model
from megarl.models.shape import ModelShape
from megarl.platform.device import DTYPES, Device, gpu_uuids, peak_gb, pick_device
from megarl.platform.env import Env, is_interactive, set_env
from megarl.telemetry.log import Silent, Telemetry, open_telemetry
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, ObjectiveState
from megarl.weights.transports import Transport
from megarl.weights.transports.collective import Collective
from megarl.weights.transports.inprocess import InProcess


@dataclass(frozen=True)
class Rank:
    """One rank of a job: its config, its coordinates, and the model's shape and tokenizer."""

    config: Config
    env: Env
    device: Device
    layout: Layout
    model_folder: Path
    shape: ModelShape
    tokenizer: Tokenizer
    transport: Transport
    phase: CurrentPhase

    @classmethod
    def of(cls, config: Config, env: Env, device: Device, phase: CurrentPhase | None = None) -> Rank:
        """torch.distributed must be initialised."""
        assert config.model.path is not None, "the launcher must set model.path"
        layout = Layout.of(config.parallel.sizes, env.world_size, env.rank)
        transport = Collective(timeout_s=config.launch.timeout_s) if env.world_size > 1 else InProcess()
        commits = set(transport.gather(config.model.revision))
        if len(commits) > 1:
            raise ValueError(f"model.revision is {' and '.join(sorted(commits))} on different nodes; set it to one")
        folder = model_folder(config.model.path, config.model.revision)
        shape = read_model(folder)
        tokenizer = load_tokenizer(folder, trust_remote_code=config.model.trust_remote_code)
        return cls(config, env, device, layout, folder, shape, tokenizer, transport, phase or CurrentPhase())


@contextmanager
def open_rank(config: Config, env: Env, phase: CurrentPhase) -> Iterator[Rank]:
    """Initialises torch.distributed, and destroys it on success only: after a failure, peers may be gone."""
    device = pick_device(env.local_rank)
    timeout = timedelta(seconds=config.launch.timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device.is_cuda else "gloo"
    if device.is_cuda:
        set_env(TORCH_GLOO_LAZY_INIT=1)  # else each of Megatron's groups, used by NCCL only, connects its ranks twice
    if env.has_launcher and not env.launched:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = make_store(env, timeout)
        dist.init_process_group(backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)
    yield Rank.of(config, env, device, phase)
    dist.destroy_process_group()


def make_trainer(rank: Rank, layout: Layout | None = None) -> Trainer:
    """The trainer of the configured model, in the rank's layout or another one."""
    config = rank.config
    return Trainer.build(
        rank.shape,
        layout or rank.layout,
        train=config.train,
        moe=config.moe,
        folder=rank.model_folder,
        device=rank.device.torch,
        seed=config.run.seed,
        megatron_options=config.trainer.megatron_options,
    )


def check_weights(rank: Rank, trainer: Trainer) -> None:
    """Raises CheckFailed, on every rank, if a weight is not finite: its log-probs would blame the engine."""
    wrong = [name for name, tensor in trainer.parameters_by_name().items() if not torch.isfinite(tensor.sum())]
    if names := sorted({name for names in rank.transport.gather(wrong) for name in names}):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise CheckFailed(
            f"the trainer's weights are not finite: NaN or infinity in {', '.join(names[:3])}{more}, as loaded from "
            f"{rank.model_folder} or a checkpoint; use an undamaged copy"
        )


def make_prompts(rank: Rank, split: Split = "train", task: Task | None = None) -> PromptStream:
    """Returns the training prompts, or the held-out ones if `split` is "eval"; of `task`, by default the run's."""
    config, task = rank.config, task or rank.config.task
    if len(set(rank.transport.gather(task.model_dump_json()))) > 1:  # each node has resolved the revision itself
        raise ValueError(f"task.name={task.name}: the dataset changed while the nodes read it; start again")
    return PromptStream(
        load_sources(task, split, [eval_task(task, part) for part in config.eval.sets] if split == "train" else ()),
        prompt_encoder(rank.tokenizer, task),
        max_tokens=config.rollout.max_prompt_tokens,
        seed=config.run.seed,
    )


def make_checkpoints(rank: Rank, trainer: Trainer, prompts: PromptStream, state: ObjectiveState) -> Checkpoints:
    config = rank.config
    return Checkpoints(
        run_dir(config) / "checkpoints",
        trainer,
        prompts,
        state,
        every=config.checkpoint.every,
        keep=config.checkpoint.keep,
        last_step=config.train.steps,
        asynchronous=config.checkpoint.asynchronous,
        export=partial(export, rank, trainer),
    )


@contextmanager
def saved(trainer: Trainer, checkpoint: Checkpoints, sleep: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Saves the progress so far if a check refuses to continue, or SIGTERM arrives: both are raised on every rank."""
    try:
        yield
    except CheckFailed:
        sleep()
        trainer.memory.onload_all()
        checkpoint.save()
        checkpoint.finish()
        raise
    checkpoint.finish()


def rank_telemetry(rank: Rank, start: int) -> closing[Telemetry | Silent]:
    """Telemetry of a run from step `start` on, with the peak of start-up; rank 0 monitors its node's GPUs."""
    telemetry = open_telemetry(
        rank.config,
        rank=rank.env.rank,
        start=start,
        interactive=is_interactive(),
        facts={"world_size": rank.env.world_size, "layout": str(rank.layout)},
        gpu_uuids=gpu_uuids(rank.env.local_world_size) if rank.device.is_cuda else (),
    )
    telemetry.add({"memory/startup/peak_gb": peak_gb(rank.device.torch)})
    return closing(telemetry)


def export(rank: Rank, trainer: Trainer, step: int | None = None) -> None:
    """Writes the trained weights to runs/<name>/hf at the end (no `step`), or hf_step_<step> every N steps.

    Every rank must call it. Does nothing unless checkpoint.export_hf requests an export.
    """
    when = rank.config.checkpoint.export_hf
    if when == "never" or (step is not None and (when == "end" or step % when)):
        return
    export_hf(
        run_dir(rank.config) / ("hf" if step is None else f"hf_step_{step}"),
        origin=rank.model_folder,
        shapes=trainer.hf_shapes(),
        sources=trainer.slices_by_rank(),
        parameters=trainer.parameters_by_name,
        transport=rank.transport,
        dtype=DTYPES[rank.config.train.dtype],
        fp32=fp32_tensors(rank.shape),
    )
