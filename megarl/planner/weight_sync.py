"""`megarl plan CONFIG --weights`: from a config to the figures of its weight sync, as plain data and as a table.

    Config --plan_weights--> {seconds, bytes, messages, ...} --describe--> rich table; telemetry.flows draws it

`launch.topology: split` puts the engines on GPUs of their own: `launch.processes` are then the trainer's, and
`rollout.replicas` says how many engines there are. Colocated, engines share the trainer's GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from megarl.config.schema import Config
from megarl.config.sizes import check_model
from megarl.config.validate import model_shape
from megarl.layout import smallest_world
from megarl.models.registry import fp32_tensors, hf_shapes, padded_vocab
from megarl.models.shape import ModelShape
from megarl.planner.cost import LINKS, Cost, cost
from megarl.weights.dealer import Fleet
from megarl.weights.flows import Flows, plan_flows

__all__ = ["describe_weights", "fleet_of", "plan_weights"]

BUCKET_BYTES = 512 << 20


def plan_weights(config: Config, *, gpu: str = "h100", bucket_bytes: int = BUCKET_BYTES) -> dict[str, Any]:
    """The figures of ARCHITECTURE section 7 and more, as JSON takes them.

    Raises ValueError or FileNotFoundError with one line for the user.
    """
    began = time.perf_counter()
    shape = model_shape(config)
    check_model(config, shape)
    fleet, itemsize = fleet_of(config), 4 if config.train.dtype == "fp32" else 2
    padded = padded_vocab(shape.vocab, fleet.parallel.tensor)
    flows = plan_flows(shape, fleet, padded_vocab=padded, itemsize=itemsize, bucket_bytes=bucket_bytes)
    size = _model_bytes(shape, itemsize)
    found = cost(flows, LINKS[gpu], size)
    return {
        "model": shape.family,
        "model_bytes": size,
        "gpu": gpu,
        "topology": config.launch.topology,
        "trainer": {"gpus": fleet.trainers, "layout": str(fleet.source(0))},
        "engine": {"replicas": fleet.replicas, "tensor": fleet.tensor, "expert": fleet.expert},
        "plan_seconds": round(time.perf_counter() - began, 3),
        **_figures(found) | ({} if config.sync.atomic else {"staged_bytes": 0}),
        "predicted_over_floor": found.predicted_seconds / found.floor_seconds,
        "bucket_bytes": bucket_bytes,
        **_by_rank(flows, found),
    }


def fleet_of(config: Config) -> Fleet:
    """Raises ValueError when the sizes do not hold the layouts."""
    rollout, launch, sizes = config.rollout, config.launch, config.parallel.sizes
    is_split, replica = launch.topology == "split", max(rollout.tensor, rollout.expert)
    trainers = launch.processes or smallest_world(sizes, 1 if is_split else replica)
    if not is_split and trainers % replica:
        raise ValueError(
            f"launch.processes={trainers} is not divisible by the {replica} ranks of an engine replica; "
            f"use a multiple of {smallest_world(sizes, replica)}"
        )
    fleet = Fleet(
        parallel=sizes,
        trainers=trainers,
        tensor=rollout.tensor,
        replicas=(rollout.replicas or 1) if is_split else trainers // replica,
        expert=rollout.expert,
        is_split=is_split,
    )
    fleet.source(0)  # refuses a world that does not hold the layout
    return fleet


def _model_bytes(shape: ModelShape, itemsize: int) -> int:
    wide = fp32_tensors(shape)
    return sum(prod(size) * (4 if name in wide else itemsize) for name, size in hf_shapes(shape).items())


def _figures(found: Cost) -> dict[str, Any]:
    names = [name for name in Cost.__dataclass_fields__ if name not in ("bytes_out", "bytes_in")]
    return {name: getattr(found, name) for name in names}


def _by_rank(flows: Flows, found: Cost) -> dict[str, Any]:
    """Bytes out and in of every GPU, and what flows from each stage to each replica."""
    fleet = flows.fleet
    stages = np.array([fleet.source(rank).pp.rank for rank in range(fleet.trainers)])
    first = ~flows.is_relay
    replica = (flows.destination[first] - fleet.first) // fleet.replica_size
    between = np.zeros((fleet.parallel.pipeline, fleet.replicas))
    np.add.at(between, (stages[flows.source[first]], replica), flows.num_bytes[first])
    engines = slice(fleet.first, fleet.first + fleet.receivers)
    return {
        "stage_of_rank": stages.tolist(),
        "bytes_out_of_trainer_rank": found.bytes_out[: fleet.trainers].tolist(),
        "bytes_in_of_engine_rank": found.bytes_in[engines].tolist(),
        "bytes_between": between.astype(np.int64).tolist(),  # [stage, replica], what a GPU keeps of its own included
    }


def describe_weights(plan: Mapping[str, Any]) -> Group:
    """For the terminal."""
    trainer, engine = plan["trainer"], plan["engine"]
    where = "on GPUs of their own" if plan["topology"] == "split" else "on the same GPUs"
    expert = f" ep{engine['expert']}" if engine["expert"] > 1 else ""
    head = Text(
        f"{plan['model']}, {plan['model_bytes'] / 1e9:,.0f} GB: Megatron {trainer['layout']} on {trainer['gpus']} GPUs "
        f"-> vLLM {engine['replicas']} x tp{engine['tensor']}{expert} {where}; "
        f"{plan['gpu'].upper()} nodes, 400G InfiniBand"
    )
    return Group(head, _bytes_table(plan), _figures_table(plan))


def _bytes_table(plan: Mapping[str, Any]) -> Table:
    table = Table(box=None, header_style="bold")
    for name in ("GB a rank", "ranks", "least", "mean", "most"):
        table.add_column(name, justify="left" if name == "GB a rank" else "right")
    stages, out = np.array(plan["stage_of_rank"]), np.array(plan["bytes_out_of_trainer_rank"]) / 1e9
    rows = [(f"out, stage {stage}", out[stages == stage]) for stage in range(int(stages.max()) + 1)]
    rows.append(("in, engine rank", np.array(plan["bytes_in_of_engine_rank"]) / 1e9))
    for name, values in rows:
        figures = (f"{value:,.3f}" for value in (values.min(), values.mean(), values.max()))
        table.add_row(name, str(len(values)), *figures)
    return table


def _figures_table(plan: Mapping[str, Any]) -> Table:
    table = Table(box=None, show_header=False)
    ratio = plan["predicted_over_floor"]
    for row in (
        (
            "time on the wire",
            f"{plan['predicted_seconds']:.3f} s, {ratio:.2f}x the floor of {plan['floor_seconds']:.3f} s",
        ),
        ("busiest link", f"{plan['busiest_link_over_mean']:.3f}x the mean"),
        ("messages", f"{plan['num_messages']:,} in {plan['num_rounds']} rounds"),
        ("kept, received", f"{plan['bytes_kept'] / 1e9:,.1f} GB, {plan['bytes_received'] / 1e9:,.1f} GB"),
        ("copied on within nodes", f"{plan['bytes_forwarded'] / 1e9:,.1f} GB of these"),
        (
            "peak extra memory",
            f"{plan['peak_extra_bytes'] / 1e9:.2f} GB (largest message {plan['largest_message_bytes'] / 1e9:.2f})"
            + (f"; and {plan['staged_bytes'] / 1e9:.2f} GB staged, on device or host" if plan["staged_bytes"] else ""),
        ),
        ("planned in", f"{plan['plan_seconds']:.1f} s"),
    ):
        table.add_row(*row)
    return table
