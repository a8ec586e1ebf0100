"""Builds a rank's Publisher from the config: trainer ranks, engine workers and ranks that are both run one plan."""

from __future__ import annotations

from typing import Any

from megarl.config.schema import Config
from megarl.models.engine import engine_table
from megarl.models.fp8 import scale_shapes, with_scales
from megarl.models.registry import fp32_tensors, hf_shapes
from megarl.models.shape import ModelShape
from megarl.models.shards import slices_of
from megarl.planner.weight_sync import plan_of, rollout_format
from megarl.platform.device import DTYPES
from megarl.weights.fleet import Fleet
from megarl.weights.publish import (
    Probe,
    Publisher,
    WeightFormat,
    WeightReceiver,
    WeightSender,
    plan_slices,
)
from megarl.weights.transports import Transport


def make_publisher(
    config: Config,
    shape: ModelShape,
    fleet: Fleet,
    transport: Transport,
    sender: WeightSender | None,
    receiver: WeightReceiver | None,
    *,
    is_cuda: bool,
    weights: WeightFormat | None = None,
    probe: Probe | None = None,
) -> Publisher:
    """A collective of the ranks of `transport`, numbered as in `fleet`; `weights`: of a model without a table."""
    sizes: dict[str, Any] = {
        "ranks_per_replica": fleet.ranks_per_replica,
        "ranks_per_node": fleet.ranks_per_node,
    }
    weights = weights or WeightFormat(
        hf_shapes(shape), DTYPES[config.train.dtype], fp32_tensors(shape)
    )
    if fmt := rollout_format(config, shape):
        weights = weights.in_fp8(scale_shapes(shape, fmt))
    if shape.bridge:
        assert sender and receiver, "the split topology has only models with a table"
        table, kept = None, transport.gather(list(receiver.slices))
        sent = transport.gather(list(sender.slices))
        plan = plan_slices(weights, sent, kept, round_bytes=config.sync.round_bytes, **sizes)
    else:
        table = with_scales(engine_table(shape), fmt) if fmt else engine_table(shape)
        table = slices_of(table, shape, fleet.engine_layout(transport.rank)) if receiver else None
        plan = plan_of(config, shape, fleet, spec="te" if is_cuda else "local")
    return Publisher(
        plan,
        sender,
        receiver,
        transport,
        weights,
        table=table,
        probe=probe,
        is_atomic=config.sync.atomic,
        **sizes,
    )
