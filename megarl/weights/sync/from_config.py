"""Builds a rank's Publisher from the config. Trainer ranks, engine workers and ranks that are both
execute the same plan."""

from collections.abc import Mapping

from megarl.config.precision import rollout_format
from megarl.config.schema import Config
from megarl.layout import Fleet
from megarl.models.engine import engine_table, linear_shapes
from megarl.models.registry import fp32_tensors, hf_shapes
from megarl.models.shape import ModelShape, Shape
from megarl.models.shards import slices_of
from megarl.platform.device import DTYPES
from megarl.weights.plan.from_config import plan_of
from megarl.weights.sync.publish import (
    Probe,
    Publisher,
    WeightFormat,
    WeightReceiver,
    WeightSender,
    plan_slices,
)
from megarl.weights.sync.transports import Transport


def engine_weights(
    config: Config, shape: ModelShape, shapes: Mapping[str, Shape] | None = None
) -> WeightFormat:
    """Returns the format in which the HF tensors of `shapes` (None: all) move to the engine."""
    dtype = DTYPES[config.train.dtype]
    weights = WeightFormat(shapes or hf_shapes(shape), dtype, fp32_tensors(shape))
    fmt = rollout_format(config, shape)
    return weights.in_blocks(fmt, linear_shapes(shape)) if fmt else weights


def make_publisher(
    config: Config,
    shape: ModelShape,
    fleet: Fleet,
    transport: Transport,
    sender: WeightSender | None,
    receiver: WeightReceiver | None,
    *,
    is_cuda: bool,
    weights: WeightFormat,
    probe: Probe | None = None,
) -> Publisher:
    """A collective of the ranks of `transport`, which are numbered as in `fleet`. `weights`: the
    format in which the tensors move."""
    table = None
    if shape.bridge:
        assert sender and receiver, "the split topology has only models with a table"
        plan = plan_slices(
            weights,
            transport.gather(list(sender.slices)),
            transport.gather(list(receiver.slices)),
            ranks_per_replica=fleet.ranks_per_replica,
            ranks_per_node=fleet.ranks_per_node,
            round_bytes=config.sync.round_bytes,
        )
    else:
        if receiver:
            fmt = weights.storage.block_format
            rules = engine_table(shape, fmt, tensor=fleet.tensor, expert=fleet.expert)
            table = slices_of(rules, shape, fleet.engine_layout(transport.rank))
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
    )
