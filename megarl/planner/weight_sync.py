"""`megarl plan CONFIG --weights`: from a config to the figures of its weight sync, as plain data and as a table.

    Config --plan_weights--> Plan, {seconds, bytes, messages, ...} --describe_weights--> rich table

`launch.topology: split` gives the engines ranks of their own: `launch.processes` are then the trainer's, and
`rollout.replicas` says how many engines there are. Colocated engines share the trainer's ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
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
from megarl.models.shards import Style
from megarl.planner.cost import LINKS, Cost, price_plan
from megarl.weights.fleet import Fleet
from megarl.weights.plan import Plan, plan_transfers

__all__ = ["describe_weights", "fleet_of", "plan_of", "plan_weights", "write_messages"]

RANKS_PER_NODE = 8


def plan_weights(config: Config, *, gpu: str = "h100") -> tuple[Plan, dict[str, Any]]:
    """The plan, and the figures of ARCHITECTURE section 7 and more, ready for JSON.

    Raises ValueError or FileNotFoundError with one line for the user.
    """
    start = time.perf_counter()
    shape = model_shape(config)
    check_model(config, shape)
    fleet = fleet_of(config)
    plan = plan_of(config, shape, fleet)
    seconds = time.perf_counter() - start
    cost = price_plan(plan, fleet, LINKS[gpu])
    return plan, {
        "model": shape.family,
        "model_bytes": _model_bytes(shape, plan.itemsize),
        "gpu": gpu,
        "topology": config.launch.topology,
        "trainer": {"gpus": fleet.trainers, "layout": str(fleet.trainer_layout(0))},
        "engine": {"replicas": fleet.replicas, "tensor": fleet.tensor, "expert": fleet.expert},
        "ranks_per_node": fleet.ranks_per_node,
        "round_bytes": config.sync.round_bytes,
        "plan_seconds": round(seconds, 3),
        **{name: getattr(cost, name) for name in Cost.__dataclass_fields__ if name not in ("bytes_out", "bytes_in")},
        **({} if config.sync.atomic else {"staged_bytes": 0}),
        "predicted_over_floor": cost.predicted_seconds / cost.floor_seconds if cost.floor_seconds else 1.0,
        **_by_rank(plan, fleet, cost),
    }


def plan_of(config: Config, shape: ModelShape, fleet: Fleet, *, style: Style = "te") -> Plan:
    """The plan that a run with this config executes; `style` is the layer spec of its modules."""
    return plan_transfers(
        shape,
        fleet,
        padded_vocab=padded_vocab(shape.vocab, fleet.parallel.tensor),
        itemsize=4 if config.train.dtype == "fp32" else 2,
        round_bytes=config.sync.round_bytes,
        style=style,
    )


def fleet_of(config: Config, *, ranks_per_node: int = RANKS_PER_NODE) -> Fleet:
    """`ranks_per_node` where `launch.processes_per_node` is null. Raises ValueError when the ranks do not hold the
    layouts."""
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
        ranks_per_node=launch.processes_per_node or ranks_per_node,
        is_split=is_split,
    )
    fleet.trainer_layout(0)  # refuses a world that does not hold the layout
    return fleet


def write_messages(plan: Plan, file: Path) -> None:
    """Every message between two ranks as it is executed: [round, sender, receiver, bytes], a JSON array per line."""
    columns = (plan.message_round, plan.message_sender, plan.message_receiver, plan.message_bytes)
    with file.open("w", encoding="utf-8") as lines:
        for message in np.stack(columns, axis=1)[plan.message_sender != plan.message_receiver].tolist():
            lines.write(json.dumps(message) + "\n")


def _model_bytes(shape: ModelShape, itemsize: int) -> int:
    wide = fp32_tensors(shape)
    return sum(prod(size) * (4 if name in wide else itemsize) for name, size in hf_shapes(shape).items())


def _by_rank(plan: Plan, fleet: Fleet, cost: Cost) -> dict[str, Any]:
    """Bytes out and in of every rank, and what flows from each stage to each replica, what ranks hold included."""
    stages = np.array([fleet.trainer_layout(rank).pp.rank for rank in range(fleet.trainers)])
    rows, direct = plan.rows, plan.rows.via < 0
    origin = stages[np.where(direct, rows.sender, rows.via)]
    replica = (rows.receiver - fleet.first_receiver) // fleet.ranks_per_replica
    flows = np.bincount(origin * fleet.replicas + replica, rows.numel, fleet.parallel.pipeline * fleet.replicas)
    engines = slice(fleet.first_receiver, fleet.first_receiver + fleet.receivers)
    return {
        "stage_of_rank": stages.tolist(),
        "bytes_out_of_trainer_rank": cost.bytes_out[: fleet.trainers].tolist(),
        "bytes_in_of_engine_rank": cost.bytes_in[engines].tolist(),
        "bytes_between": (plan.itemsize * flows).astype(np.int64).reshape(-1, fleet.replicas).tolist(),
    }


def describe_weights(figures: Mapping[str, Any]) -> Group:
    """For the terminal."""
    trainer, engine = figures["trainer"], figures["engine"]
    where = "on GPUs of their own" if figures["topology"] == "split" else "on the same GPUs"
    expert = f" ep{engine['expert']}" if engine["expert"] > 1 else ""
    head = (
        f"{figures['model']}, {figures['model_bytes'] / 1e9:,.0f} GB: Megatron {trainer['layout']} on "
        f"{trainer['gpus']} GPUs -> vLLM {engine['replicas']} x tp{engine['tensor']}{expert} {where}; "
        f"{figures['gpu'].upper()} nodes of {figures['ranks_per_node']}, 400G InfiniBand"
    )
    by_rank = Table(box=None, header_style="bold")
    for name in ("GB per rank", "ranks", "min", "mean", "max"):
        by_rank.add_column(name, justify="left" if name == "GB per rank" else "right")
    stages, out = np.array(figures["stage_of_rank"]), np.array(figures["bytes_out_of_trainer_rank"]) / 1e9
    rows = [(f"out, stage {stage}", out[stages == stage]) for stage in range(int(stages.max()) + 1)]
    for name, values in (*rows, ("in, engine rank", np.array(figures["bytes_in_of_engine_rank"]) / 1e9)):
        by_rank.add_row(name, str(len(values)), *(f"{x:,.3f}" for x in (values.min(), values.mean(), values.max())))
    totals = Table(box=None, show_header=False)
    for name, text in _totals(figures).items():
        totals.add_row(name, text)
    return Group(Text(head), by_rank, totals)


def _totals(figures: Mapping[str, Any]) -> dict[str, str]:
    gb = {
        name: value / 1e9
        for name, value in figures.items()
        if name.endswith("_bytes") or (name.startswith("bytes_") and isinstance(value, int))
    }
    seconds, floor, ratio = (figures[name] for name in ("predicted_seconds", "floor_seconds", "predicted_over_floor"))
    memory = f"{gb['peak_extra_bytes']:.2f} GB (largest message {gb['largest_message_bytes']:.2f})"
    if figures["staged_bytes"]:
        memory += f"; and {gb['staged_bytes']:.2f} GB staged, on device or host"
    return {
        "time on the wire": f"{seconds:.3f} s, {ratio:.2f}x the floor of {floor:.3f} s",
        "busiest link": f"{figures['busiest_link_over_mean']:.3f}x the mean",
        "messages": f"{figures['num_messages']:,} in {figures['num_rounds']} rounds",
        "kept, received": f"{gb['bytes_kept']:,.1f} GB, {gb['bytes_received']:,.1f} GB",
        "relayed within nodes": f"{gb['bytes_relayed']:,.1f} GB of these",
        "peak extra memory": memory,
        "planned in": f"{figures['plan_seconds']:.1f} s",
    }
