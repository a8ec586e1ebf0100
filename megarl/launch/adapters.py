"""LoRA's adapters and the engine: what it must know of them when it starts, and the publisher that moves them alone."""

from __future__ import annotations

from typing import Any

from megarl.launch.build import Rank
from megarl.models.lora import AdapterFormat, adapter_table
from megarl.models.registry import megatron_table
from megarl.models.shards import shapes_of, slices_by_rank
from megarl.trainer.trainer import Trainer
from megarl.weights.publish import Probe, Publisher, WeightFormat, WeightSender, plan_slices


def engine_adapters(rank: Rank) -> AdapterFormat | None:
    """None: the engine gets whole weights in every sync."""
    shape, lora = rank.shape, rank.config.lora
    if lora is None or lora.sync == "merged":
        return None
    table = adapter_table(megatron_table(shape), lora.targets, lora.rank)
    return AdapterFormat(shapes_of(table, shape), lora.rank, lora.alpha)


def adapter_publisher(
    rank: Rank,
    trainer: Trainer,
    weights: Publisher,
    receiver: Any,
    ranks_per_node: int,
    probe: Probe,
) -> Publisher:
    """`weights` publishes the base model, `receiver` is the engine's AdapterReceiver. A collective."""
    adapters, transport, is_atomic = trainer.adapters, rank.transport, rank.config.sync.atomic
    assert adapters is not None
    fmt = WeightFormat(adapters.shapes, weights.weights.dtype)
    sources = slices_by_rank(adapters.table, rank.shape, trainer.layout)
    wanted = transport.gather(list(receiver.slices))  # every rank needs them whole
    sizes: dict[str, Any] = {"ranks_per_replica": 1, "ranks_per_node": ranks_per_node}
    plan = plan_slices(fmt, sources, wanted, round_bytes=rank.config.sync.round_bytes, **sizes)
    sender = WeightSender(adapters.slices, lambda: adapters.parameters)
    moved = Publisher(
        plan, sender, receiver, transport, fmt, probe=probe, is_atomic=is_atomic, **sizes
    )
    moved.base = weights
    return moved
