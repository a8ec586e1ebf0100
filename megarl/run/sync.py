"""Builds a rank's weight publisher (full weights, encoded weights or adapters) and parity gate."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megarl.config.launch import fleet_of
from megarl.config.precision import rollout_format
from megarl.models.engine import with_scales
from megarl.models.shards import slices_of
from megarl.parity.cause import CauseSearch
from megarl.parity.gate import (
    MOE_PROBE_PROMPTS,
    PROBE_PROMPTS,
    PROBE_TOKENS,
    Measured,
    ParityChecks,
    as_in_engine,
    measure_logprobs,
    rounding_of,
)
from megarl.rollout.vllm.engine import Engine
from megarl.run.context import RankContext
from megarl.run.data import make_prompts
from megarl.run.engine import engine_adapters, make_engine
from megarl.run.models import check_weights, make_trainer
from megarl.run.phases import TimedPhases
from megarl.telemetry.log import NodeTelemetry
from megarl.trainer.trainer import Trainer
from megarl.types import PublishReport, TokenBatch
from megarl.weights.encode.blocks import BlockEncoder
from megarl.weights.sync.from_config import engine_weights, make_publisher
from megarl.weights.sync.publish import Probe, Publisher, WeightFormat, WeightSender, plan_slices


def rank_publisher(rank: RankContext, trainer: Trainer, engine: Engine, probe: Probe) -> Publisher:
    """Builds the publisher that moves this trainer's weights to the engine. A collective."""
    config = rank.config
    env = rank.env
    fleet = fleet_of(config, env.world_size, ranks_per_node=env.local_world_size)
    make = partial(
        make_publisher,
        config,
        rank.shape,
        fleet,
        rank.transport,
        is_cuda=rank.device.type == "cuda",
        weights=engine_weights(config, rank.shape, trainer.tensors.shapes),
    )
    receiver: Any = engine.receiver
    if engine_adapters(rank) is not None:
        sender = WeightSender(trainer.tensors.slices, trainer.parameters_by_name)
        base = make(sender, receiver.base)
        return _adapter_publisher(rank, trainer, base, receiver, fleet.ranks_per_node, probe)
    encoder = make_encoder(rank, trainer)
    if encoder is None:
        sender = WeightSender(trainer.tensors.slices, trainer.merged_parameters)
    else:
        sender = encoder.sender(trainer.parameters_by_name)
    return make(sender, receiver, probe=probe)


def _adapter_publisher(
    rank: RankContext,
    trainer: Trainer,
    weights: Publisher,
    receiver: Any,
    ranks_per_node: int,
    probe: Probe,
) -> Publisher:
    """Builds the publisher that moves LoRA adapters to the engine. A collective.

    `receiver` is the engine's AdapterReceiver. `weights` is the publisher of the base model, which
    publishes once, before the first adapters.
    """
    adapters = trainer.adapters
    transport = rank.transport
    assert adapters is not None
    tensors = adapters.tensors
    fmt = WeightFormat(tensors.shapes, weights.weights.dtype)
    plan = plan_slices(
        fmt,
        tensors.by_rank(),
        transport.gather(list(receiver.slices)),  # every engine rank receives full adapters
        ranks_per_replica=1,
        ranks_per_node=ranks_per_node,
        round_bytes=rank.config.sync.round_bytes,
    )
    moved = Publisher(
        plan,
        WeightSender(tensors.slices, lambda: adapters.parameters),
        receiver,
        transport,
        fmt,
        probe=probe,
        is_atomic=rank.config.sync.atomic,
    )
    moved.base = weights
    return moved


def make_encoder(rank: RankContext, trainer: Trainer) -> BlockEncoder | None:
    """Returns the encoder of weights to the engine's block format; None if the engine uses the
    trainer's dtype.
    """
    fmt = rollout_format(rank.config, rank.shape)
    if fmt is None:
        return None

    def reduce_max(values: Tensor, is_expert: bool) -> None:
        group = trainer.groups.expert_tensor if is_expert else trainer.groups.tensor
        if group.size() > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=group)

    assert trainer.table is not None
    table = with_scales(trainer.table, fmt, is_whole=True)
    return BlockEncoder(slices_of(table, trainer.shape, trainer.layout), fmt, reduce_max)


def make_checks(
    rank: RankContext,
    measure: Callable[[TokenBatch], Measured],
    engines: Sequence[Any],
    **options: Any,
) -> ParityChecks:
    """Builds the ParityChecks: the gate and the probe, which completes the first training prompts.

    `options` are additional fields of ParityChecks.
    """
    config = rank.config
    added = max(1, min(PROBE_TOKENS, config.rollout.max_tokens - 1))
    # the longest row that the engine can score is one token shorter than its context
    longest = engines[0].max_model_len - 1 - added
    count = MOE_PROBE_PROMPTS if rank.shape.is_moe else PROBE_PROMPTS
    return ParityChecks(
        rank.transport,
        measure,
        engines,
        [prompt.tokens[-longest:] for prompt in make_prompts(rank).take(count)],
        added,
        max_diff=config.checks.max_logprob_diff,
        always=config.checks.probe == "always" or config.rollout.max_staleness > 0,
        is_moe=rank.shape.is_moe,
        **options,
    )


def parity_checks(rank: RankContext, trainer: Trainer, engine: Engine) -> ParityChecks:
    """Builds the colocated ParityChecks, which also search for the cause of a difference."""
    encoder = make_encoder(rank, trainer)
    search = CauseSearch(
        trainer,
        engine,
        rank.transport,
        rounding_of(trainer, encoder),
    )

    def find(*args: Any) -> str | None:
        with as_in_engine(trainer, encoder):
            return search.find(*args)

    return make_checks(
        rank,
        partial(measure_logprobs, trainer, encoder=encoder),
        [engine],
        version=lambda: engine.receiver.version,
        follows_engine=rank.config.rollout.router_replay == "engine",
        find=find,
    )


def synced(rank: RankContext) -> tuple[Trainer, Engine, ParityChecks, PublishReport]:
    """Builds trainer and engine and syncs once, for commands that do not train.

    Afterwards the engine can sample and the trainer is offloaded, as after a sync of a run. Returns
    (trainer, engine, parity checks, report of the sync).
    """
    trainer = make_trainer(rank)
    check_weights(rank, trainer)
    trainer.memory.offload_all()
    engine = make_engine(rank)
    engine.sleep()
    phases = TimedPhases(NodeTelemetry(), rank.device, [trainer], engine, rank.phase)
    parity = parity_checks(rank, trainer, engine)
    with phases.sync():
        report = rank_publisher(rank, trainer, engine, parity).publish(version=0)
    return trainer, engine, parity, report
