"""Builds a rank's Publisher from the config: trainer ranks, engine workers and ranks that are both
run one plan."""

from megarl.config.precision import rollout_format
from megarl.config.schema import Config
from megarl.layout import Fleet
from megarl.models.engine import engine_table
from megarl.models.fp8 import scale_shapes, with_scales
from megarl.models.shape import ModelShape
from megarl.models.shards import slices_of
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
    """A collective of the ranks of `transport`, numbered as in `fleet`; `weights`: the
    trainer's."""
    sizes = {
        "ranks_per_replica": fleet.ranks_per_replica,
        "ranks_per_node": fleet.ranks_per_node,
    }
    fmt = rollout_format(config, shape)
    if fmt:
        weights = weights.in_fp8(scale_shapes(shape, fmt))
    table = None
    if shape.bridge:
        assert sender and receiver, "the split topology has only models with a table"
        kept = transport.gather(list(receiver.slices))
        plan = plan_slices(
            weights,
            transport.gather(list(sender.slices)),
            kept,
            round_bytes=config.sync.round_bytes,
            **sizes,
        )
    else:
        if receiver:
            rules = engine_table(shape)
            if fmt:
                rules = with_scales(rules, fmt)
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
        **sizes,
    )
