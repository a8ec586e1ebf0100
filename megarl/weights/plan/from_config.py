"""`megarl plan CONFIG --weights`: from a config to the figures of its weight sync.

    Config --plan_weights--> Plan, {seconds, bytes, messages, ...} --describe_weights--> text

With `launch.topology: split`, `launch.processes` counts the trainer's ranks and `rollout.replicas` the engines.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config.model_checks import check_model
from megarl.config.schema import Config
from megarl.config.validate import model_shape
from megarl.layout import smallest_world
from megarl.models.formats import BlockFormat
from megarl.models.fp8 import fp8_format
from megarl.models.registry import fp32_tensors, hf_shapes, padded_vocab
from megarl.models.shape import ModelShape
from megarl.models.shards import LayerSpec
from megarl.planner.cost import LINKS, Cost, estimate_cost
from megarl.weights.fleet import Fleet
from megarl.weights.plan import Plan, plan_transfers

RANKS_PER_NODE = 8


def plan_weights(config: Config, *, gpu: str = "h100") -> tuple[Plan, dict[str, Any]]:
    """The plan, and its figures as JSON values, in bytes and seconds. Raises ValueError or FileNotFoundError."""
    start = time.perf_counter()
    shape = model_shape(config)
    check_model(config, shape)
    fleet = fleet_of(config)
    plan = plan_of(config, shape, fleet)
    seconds = time.perf_counter() - start
    cost, fp32 = estimate_cost(plan, fleet, LINKS[gpu]), fp32_tensors(shape)
    sizes = (
        prod(size) * (4 if name in fp32 else _itemsize(config))
        for name, size in hf_shapes(shape).items()
    )
    return plan, {
        "model": shape.family,
        "model_bytes": sum(sizes),
        "gpu": gpu,
        "topology": config.launch.topology,
        "trainer": {"gpus": fleet.trainers, "layout": str(fleet.trainer_layout(0))},
        "engine": {"replicas": fleet.replicas, "tensor": fleet.tensor, "expert": fleet.expert},
        "ranks_per_node": fleet.ranks_per_node,
        "round_bytes": config.sync.round_bytes,
        "plan_seconds": round(seconds, 3),
        **{
            name: getattr(plan, name)
            for name in ("num_rounds", "bytes_kept", "bytes_received", "bytes_relayed")
        },
        **{
            name: getattr(cost, name)
            for name in Cost.__dataclass_fields__
            if name not in ("bytes_out", "bytes_in")
        },
        **({} if config.sync.atomic else {"staged_bytes": 0}),
        "predicted_over_floor": cost.predicted_seconds / cost.floor_seconds
        if cost.floor_seconds
        else 1.0,
        **_by_rank(plan, fleet, cost),
    }


def plan_of(config: Config, shape: ModelShape, fleet: Fleet, *, spec: LayerSpec = "te") -> Plan:
    """The plan that a run with this config executes; `spec` is the layer spec of Megatron's modules."""
    return plan_transfers(
        shape,
        fleet,
        padded_vocab=padded_vocab(shape.vocab, fleet.parallel.tensor),
        itemsize=_itemsize(config),
        round_bytes=config.sync.round_bytes,
        spec=spec,
        fp8=rollout_format(config, shape),
    )


def _itemsize(config: Config) -> int:
    return 4 if config.train.dtype == "fp32" else 2


def rollout_format(config: Config, shape: ModelShape) -> BlockFormat | None:
    """The blocks in which the engine keeps its linear layers; None: it does not quantise."""
    rollout = config.rollout
    return (
        fp8_format(shape, rollout.tensor, rollout.expert) if rollout.quantization == "fp8" else None
    )


def fleet_of(config: Config, *, ranks_per_node: int = RANKS_PER_NODE) -> Fleet:
    """Raises ValueError if the number of ranks does not fit the layouts. `ranks_per_node` applies where
    `launch.processes_per_node` is null."""
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
    fleet.trainer_layout(0)  # raises ValueError if the world does not fit the layout
    return fleet


def write_messages(plan: Plan, file: Path) -> None:
    """Writes every message between two ranks as a JSON array per line: [round, sender, receiver, bytes]."""
    columns = (plan.message_round, plan.message_sender, plan.message_receiver, plan.message_bytes)
    with file.open("w", encoding="utf-8") as lines:
        for message in np.stack(columns, axis=1)[
            plan.message_sender != plan.message_receiver
        ].tolist():
            lines.write(json.dumps(message) + "\n")


def _by_rank(plan: Plan, fleet: Fleet, cost: Cost) -> dict[str, Any]:
    """Bytes that each rank sends and receives, and bytes from each stage to each replica, local copies included."""
    stages = np.array([fleet.trainer_layout(rank).pp.rank for rank in range(fleet.trainers)])
    rows, direct = plan.rows, plan.rows.via < 0
    origin = stages[np.where(direct, rows.sender, rows.via)]
    replica = (rows.receiver - fleet.first_receiver) // fleet.ranks_per_replica
    flows = np.bincount(
        origin * fleet.replicas + replica, rows.numel, fleet.parallel.pipeline * fleet.replicas
    )
    engines = slice(fleet.first_receiver, fleet.first_receiver + fleet.receivers)
    return {
        "stage_of_rank": stages.tolist(),
        "bytes_out_of_trainer_rank": cost.bytes_out[: fleet.trainers].tolist(),
        "bytes_in_of_engine_rank": cost.bytes_in[engines].tolist(),
        "bytes_between": (plan.itemsize * flows)
        .astype(np.int64)
        .reshape(-1, fleet.replicas)
        .tolist(),
    }


def describe_weights(figures: Mapping[str, Any]) -> str:
    """The figures as text for the terminal."""
    trainer, engine = figures["trainer"], figures["engine"]
    gb = {name: value / 1e9 for name, value in figures.items() if isinstance(value, int)}
    where = "on separate GPUs" if figures["topology"] == "split" else "on the same GPUs"
    expert = f" ep{engine['expert']}" if engine["expert"] > 1 else ""
    floor = f"{figures['predicted_over_floor']:.2f}x the floor of {figures['floor_seconds']:.3f} s"
    memory = f"{gb['peak_extra_bytes']:.2f} GB (largest message {gb['largest_message_bytes']:.2f})"
    if figures["staged_bytes"]:
        memory += f", plus {gb['staged_bytes']:.2f} GB staged on device or host"
    lines = {
        "time on the wire": f"{figures['predicted_seconds']:.3f} s, {floor}",
        "busiest link": f"{figures['busiest_link_over_mean']:.3f}x the mean",
        "messages": f"{figures['num_messages']:,} in {figures['num_rounds']} rounds",
        "kept, received": f"{gb['bytes_kept']:,.1f} GB, {gb['bytes_received']:,.1f} GB",
        "relayed within nodes": f"{gb['bytes_relayed']:,.1f} GB of these",
        "peak extra memory": memory,
        "planned in": f"{figures['plan_seconds']:.1f} s",
    }
    stages, sent = (
        np.array(figures["stage_of_rank"]),
        np.array(figures["bytes_out_of_trainer_rank"]),
    )
    by_rank = {f"sent by stage {stage}": sent[stages == stage] for stage in np.unique(stages)}
    for name, sizes in (
        by_rank | {"received by engines": np.array(figures["bytes_in_of_engine_rank"])}
    ).items():
        low, mean, high = (
            f"{size / 1e9:,.3f}" for size in (sizes.min(), sizes.mean(), sizes.max())
        )
        lines[name] = f"{low} to {high} GB per rank ({len(sizes)} ranks), mean {mean}"
    head = (
        f"{figures['model']}, {gb['model_bytes']:,.0f} GB: Megatron {trainer['layout']} on {trainer['gpus']} GPUs -> "
        f"vLLM {engine['replicas']} x tp{engine['tensor']}{expert} {where}; {figures['gpu'].upper()} nodes of "
        f"{figures['ranks_per_node']}, 400G InfiniBand"
    )
    return "\n".join([head, *(f" {name:22}  {text}" for name, text in lines.items())])
