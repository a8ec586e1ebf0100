"""Builds what every stage needs on one rank: the process group, the trainer, prompts, checkpoints, telemetry.

Every rank must call the same functions in the same order: engines and process groups are created by collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.objective import Objective
from megarl.checkpoint.hf import export_hf
from megarl.checkpoint.hf_folder import HfFolder
from megarl.checkpoint.state import Checkpoints, Further
from megarl.checkpoint.torch_dist import CRITIC
from megarl.config.load import run_dir
from megarl.config.schema import Config, FrozenModel, Task
from megarl.data.conversations import example_encoder
from megarl.data.prompts import PromptStream
from megarl.data.tasks import Split, eval_task, load_sources
from megarl.data.tokenizer import (
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
    pad_token,
    prompt_encoder,
)
from megarl.launch.exit_codes import CurrentPhase
from megarl.launch.heartbeat import make_store
from megarl.layout import Layout
from megarl.models.fp8 import with_scales
from megarl.models.hub import model_folder
from megarl.models.lora import CONFIG
from megarl.models.registry import FAMILIES, fp32_tensors, read_model
from megarl.models.shape import ModelShape
from megarl.models.shards import slices_by_rank, slices_of
from megarl.planner.weight_sync import rollout_format
from megarl.platform.device import DTYPES, gpu_uuids, pick_device
from megarl.platform.env import Env, is_interactive, set_env
from megarl.rewards.served_model import ServedModel, client_of
from megarl.roles import Checkpoint, Stateful
from megarl.stages.evaluation import Evaluation, Measure
from megarl.telemetry.log import Silent, Telemetry
from megarl.trainer.actor_critic import ActorCritic, CriticHead
from megarl.trainer.heads import Head, RewardHead, ValueHead
from megarl.trainer.learner import PolicyLearner
from megarl.trainer.reference import forward_in_turn
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, ObjectiveState, TokenBatch, TokenOutputs
from megarl.weights.fp8 import Fp8Quantizer
from megarl.weights.publish import WeightFormat
from megarl.weights.quantize import PLAIN, Storage
from megarl.weights.transports import InProcess, Transport
from megarl.weights.transports.collective import Collective

OFFLOAD_ALL = ("gradients", "optimizer", "weights")  # train.offload


@dataclass(frozen=True)
class Rank:
    """One rank of a job: its config, its coordinates, and the model's shape and tokenizer."""

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
    ) -> Rank:
        """torch.distributed must be initialised if there are several ranks."""
        assert config.model.path is not None, "the launcher must set model.path"
        layout = layout or Layout.of(config.parallel.sizes, env.world_size, env.rank)
        transport = (
            Collective(timeout_s=config.launch.timeout_s) if env.world_size > 1 else InProcess()
        )
        commits = set(transport.gather(config.model.revision))
        if len(commits) > 1:
            raise ValueError(
                f"model.revision is {' and '.join(sorted(commits))} on different nodes; set it to one"
            )
        folder = model_folder(config.model.path, config.model.revision)
        shape = read_model(folder)
        tokenizer = load_tokenizer(folder, trust_remote_code=config.model.trust_remote_code)
        return cls(
            config,
            env,
            device,
            layout,
            folder,
            shape,
            tokenizer,
            transport,
            phase or CurrentPhase(),
        )


@contextmanager
def open_rank(config: Config, env: Env, phase: CurrentPhase, store: Any = None) -> Iterator[Rank]:
    """Initialises torch.distributed; destroys it on success only, as after a failure peers may be gone. `store` None:
    the ranks meet as their launcher arranged it."""
    device, timeout = pick_device(env.local_rank), timedelta(seconds=config.launch.timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        set_env(
            TORCH_GLOO_LAZY_INIT=1
        )  # else each of Megatron's groups, used by NCCL only, connects its ranks twice
    if store is None and (env.launched or not env.has_launcher):
        store = make_store(env, timeout)
    dist.init_process_group(
        backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout
    )
    yield Rank.of(config, env, device, phase)
    dist.destroy_process_group()


def make_trainer(
    rank: Rank,
    layout: Layout | None = None,
    *,
    head: Head | None = None,
    folder: Path | None = None,
    beside: Trainer | None = None,
    **train: Any,
) -> Trainer:
    """Builds the configured trainer; arguments and `train` override settings, `beside` shares its process groups."""
    config, replays = rank.config, rank.config.rollout.router_replay != "none"
    return Trainer.build(
        rank.shape if folder is None else read_model(folder),
        layout or rank.layout,
        train=config.train.model_copy(update=train),
        moe=config.moe,
        head=config.lora if head is None and beside is None else head,  # only the policy is adapted
        folder=folder or rank.model_folder,
        device=rank.device,
        seed=config.run.seed,
        megatron_options={"fp8": config.precision.fp8}
        | config.trainer.megatron_options
        | ({"moe_router_fusion": False} if replays else {}),
        beside=beside,
    )


def make_objective(config: Config) -> Objective:
    return Objective(
        config.algorithm,
        config.rollout.max_tokens,
        config.critic.lam,
        config.critic.bootstrap_truncated,
    )


def make_learner(rank: Rank, trainer: Trainer, objective: Objective) -> PolicyLearner | ActorCritic:
    """The learner, with a critic if the objective needs one; its reference policy is the trainer's current weights."""
    config, critic = rank.config, rank.config.critic
    frozen = {
        field: frozen_model(rank, part, key, trainer)
        for field, key in (("ref_logprobs", "reference"), ("teacher_logprobs", "teacher"))
        if (part := getattr(config, key)) is not None
    }
    records_routes = config.rollout.router_replay == "trainer"
    learner = PolicyLearner.of(
        trainer, objective, seed=config.run.seed, frozen=frozen, records_routes=records_routes
    )
    if not objective.algorithm.needs_critic:
        return learner
    folder = None if critic.model is None else model_folder(critic.model)
    head = CriticHead() if critic.bootstrap_truncated else ValueHead()
    values = make_trainer(
        rank, head=head, folder=folder, beside=trainer, lr=critic.lr, min_lr=critic.min_lr
    )
    return ActorCritic(learner, values, critic)


def frozen_model(
    rank: Rank, part: FrozenModel, key: str, trainer: Trainer
) -> Callable[[TokenBatch], TokenOutputs]:
    """Returns the function that scores batches with the model of the section `key`."""
    top_k = rank.config.algorithm.distill_top_k if key == "teacher" else 0
    if part.model is None:
        return ServedModel(client_of(part, key), part.served_name, rank.transport, top_k)
    folder = model_folder(part.model)
    check_vocabulary(rank.tokenizer, load_tokenizer(folder), f"{key}.model={part.model}")
    frozen = make_trainer(
        rank, folder=folder, beside=trainer, offload=OFFLOAD_ALL, optimizer_cpu_offload=False
    )
    check_weights(rank, frozen)
    frozen.memory.offload_all()
    return partial(forward_in_turn, frozen, trainer.memory, top_k=top_k)


def make_quantizer(rank: Rank, trainer: Trainer) -> Fp8Quantizer | None:
    """Returns what quantises the trainer's weights as the engine has them; None if it does not quantise."""
    if (fmt := rollout_format(rank.config, rank.shape)) is None:
        return None

    def reduce_max(values: Tensor, is_expert: bool) -> None:
        group = trainer.groups.expert_tensor if is_expert else trainer.groups.tensor
        if group.size() > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=group)

    assert trainer.table is not None
    slices = slices_of(
        with_scales(trainer.table, fmt, is_whole=True), trainer.shape, trainer.layout
    )
    return Fp8Quantizer(slices, fmt, reduce_max)


def check_weights(rank: Rank, trainer: Trainer) -> None:
    """Raises CheckFailed, on every rank, if a weight is not finite: its log-probs would blame the engine."""
    wrong = [
        name
        for name, tensor in trainer.parameters_by_name().items()
        if not torch.isfinite(tensor.sum())
    ]
    if names := sorted({name for names in rank.transport.gather(wrong) for name in names}):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise CheckFailed(
            f"the trainer's weights are not finite: NaN or infinity in {', '.join(names[:3])}{more}, as loaded from "
            f"{rank.model_folder} or a checkpoint; use an undamaged copy"
        )


def make_prompts(rank: Rank, split: Split = "train", task: Task | None = None) -> PromptStream:
    """Returns the training prompts, or the held-out ones if `split` is "eval"; of `task`, by default the run's."""
    config, task = rank.config, task or rank.config.task
    if (
        len(set(rank.transport.gather(task.model_dump_json()))) > 1
    ):  # each node has resolved the revision itself
        raise ValueError(
            f"task.name={task.name}: the dataset changed while the nodes read it; start again"
        )
    stream = PromptStream(
        load_sources(
            task,
            split,
            [eval_task(task, part) for part in config.eval.sets] if split == "train" else (),
        ),
        prompt_encoder(rank.tokenizer, task),
        max_tokens=config.rollout.max_prompt_tokens,
        seed=config.run.seed,
    )
    if config.stage == "sft":
        stream.example = example_encoder(rank.tokenizer, task, config.sft.roles)
    return stream


def make_checkpoints(
    rank: Rank,
    trainer: Trainer,
    prompts: Stateful,
    state: ObjectiveState,
    learner: PolicyLearner | ActorCritic | None = None,
    further: Further | None = None,
) -> Checkpoints:
    """They save the learner's critic, if any, and what is `further`."""
    config, further = rank.config, further or Further()
    if isinstance(learner, ActorCritic):
        further = replace(further, models={CRITIC: learner.critic, **further.models})
    _storage(rank)  # an impossible export fails now
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
        further=further,
    )


@contextmanager
def saved(
    trainers: Sequence[Trainer], checkpoint: Checkpoint, sleep: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Saves the progress so far if a check refuses to continue, or SIGTERM arrives: both are raised on every rank."""
    try:
        yield
    except CheckFailed:
        sleep()
        for trainer in trainers:
            trainer.memory.onload_all()
        checkpoint.save()
        checkpoint.finish()
        raise
    checkpoint.finish()


def rank_telemetry(
    rank: Rank, start: int, world_size: int | None = None
) -> closing[Telemetry | Silent]:
    """Telemetry of a run from step `start` on; rank 0 monitors its node's GPUs."""
    if rank.env.rank:
        return closing(Silent())
    facts = {"world_size": world_size or rank.env.world_size, "layout": str(rank.layout)}
    gpus = gpu_uuids(rank.env.local_world_size) if rank.device.type == "cuda" else ()
    return closing(
        Telemetry(
            rank.config, start=start, interactive=is_interactive(), facts=facts, gpu_uuids=gpus
        )
    )


def make_evaluation(
    rank: Rank, measures: Sequence[Measure], start: int, **outputs: Any
) -> Evaluation:
    """Of a run from step `start` on. Results go to eval.jsonl and the terminal; `outputs` are other fields."""
    if rank.env.is_main:
        outputs |= {"file": run_dir(rank.config) / "eval.jsonl", "say": print}
    evaluation = Evaluation(
        measures, every=rank.config.eval.every, last_step=rank.config.train.steps, **outputs
    )
    evaluation.forget(start)
    return evaluation


def export(rank: Rank, trainer: Trainer, step: int | None = None) -> None:
    """A collective. Writes the trained weights as checkpoint.export_hf requests: to runs/<name>/hf at the end (no
    `step`), or hf_step_<step>. LoRA's adapters are always written at the end, as a PEFT folder: runs/<name>/adapter."""
    when, folder = rank.config.checkpoint.export_hf, run_dir(rank.config)
    suffix = "" if step is None else f"_step_{step}"
    is_due = when != "never" and (step is None or (when != "end" and step % when == 0))
    dtype = DTYPES[rank.config.train.dtype]
    if (adapters := trainer.adapters) is not None and (is_due or step is None):
        export_hf(
            folder / f"adapter{suffix}",
            origin=None,
            weights=WeightFormat(adapters.shapes, dtype),
            sources=slices_by_rank(adapters.table, rank.shape, rank.layout),
            parameters=lambda: adapters.parameters,
            transport=rank.transport,
            changes={CONFIG: adapters.peft_config(str(rank.model_folder))},
        )
    if is_due:
        export_hf(
            folder / f"hf{suffix}",
            origin=rank.model_folder,
            weights=WeightFormat(trainer.hf_shapes(), dtype, fp32_tensors(rank.shape)),
            sources=trainer.slices_by_rank(),
            parameters=trainer.merged_parameters,
            transport=rank.transport,
            storage=_storage(rank),
            changes=_changes_by_head(rank, trainer.head),
        )


def _storage(rank: Rank) -> Storage:
    """Raises ValueError if checkpoint.export_format is impossible for this model."""
    options = rank.config.checkpoint
    is_plain = options.export_hf == "never" or options.export_format == "bf16"
    return PLAIN if is_plain else HfFolder(rank.model_folder).storage()


def _changes_by_head(rank: Rank, head: Head) -> dict[str, dict[str, Any]]:
    """Returns the keys of config.json, and of the tokenizer's, that differ in a folder of the model with this head."""
    if not isinstance(head, ValueHead):
        return {}
    name = FAMILIES[rank.shape.family].architecture.removesuffix("ForCausalLM") + head.architecture
    pad, text = pad_token(rank.tokenizer)
    config = {
        "architectures": [name],
        "num_labels": head.outputs,
        "id2label": None,
        "label2id": None,
    }
    if isinstance(head, RewardHead):
        config["megarl_reward_head"] = {"kind": head.kind, "aggregate": head.aggregate}
    has_file = text is not None and (rank.model_folder / "tokenizer_config.json").is_file()
    tokenizer = {"tokenizer_config.json": {"pad_token": text}} if has_file else {}
    return {"config.json": config | {"pad_token_id": pad}, **tokenizer}
