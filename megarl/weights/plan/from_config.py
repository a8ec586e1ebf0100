"""Implements `megarl plan CONFIG --weights`: computes the figures of a config's weight sync.

    Config --plan_weights--> Plan, {seconds, bytes, messages, ...} --describe_weights--> text

With `launch.topology: split`, `launch.processes` counts the trainer's ranks and `rollout.replicas`
the engines."""

import json
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config.launch import fleet_of
from megarl.config.model import check_model
from megarl.config.precision import rollout_format
from megarl.config.schema import Config
from megarl.config.validate import model_shape
from megarl.layout import Fleet
from megarl.models.registry import fp32_tensors, hf_shapes, padded_vocab
from megarl.models.shape import ModelShape
from megarl.models.shards import LayerSpec
from megarl.weights.plan.cost import LINKS, Cost, estimate_cost
from megarl.weights.plan.plan import Plan, plan_transfers
from megarl.weights.plan.tables import sums_at


def plan_weights(config: Config, *, gpu: str = "h100") -> tuple[Plan, dict[str, Any]]:
    """Returns the plan and its figures (JSON values, in bytes and seconds). Raises ValueError if
    the config or the model is not supported, FileNotFoundError if there is no model."""
    start = time.perf_counter()
    shape = model_shape(config)
    check_model(config, shape)
    fleet = fleet_of(config)
    plan = plan_of(config, shape, fleet)
    seconds = time.perf_counter() - start
    cost = estimate_cost(plan, fleet, LINKS[gpu])
    shapes = hf_shapes(shape)
    itemsizes = dict.fromkeys(shapes, _itemsize(config))
    itemsizes |= dict.fromkeys(fp32_tensors(shape), 4)
    figures = {
        "model": shape.family,
        "model_bytes": sum(itemsizes[name] * prod(size) for name, size in shapes.items()),
        "gpu": gpu,
        "topology": config.launch.topology,
        "trainer": {"gpus": fleet.trainers, "layout": str(fleet.trainer_layout(0))},
        "engine": {"replicas": fleet.replicas, "tensor": fleet.tensor, "expert": fleet.expert},
        "ranks_per_node": fleet.ranks_per_node,
        "round_bytes": config.sync.round_bytes,
        "plan_seconds": round(seconds, 3),
    }
    for name in ("num_rounds", "bytes_kept", "bytes_received", "bytes_relayed"):
        figures[name] = getattr(plan, name)
    figures |= vars(cost)
    del figures["bytes_out"], figures["bytes_in"]  # arrays, not JSON values
    if not config.sync.atomic or config.rollout.sleep_level == 2:
        figures["staged_bytes"] = 0
    figures["predicted_over_floor"] = 1.0
    if cost.floor_seconds:
        figures["predicted_over_floor"] = cost.predicted_seconds / cost.floor_seconds
    return plan, figures | _by_rank(plan, fleet, cost)


def plan_of(
    config: Config,
    shape: ModelShape,
    fleet: Fleet,
    *,
    spec: LayerSpec = "te",
) -> Plan:
    """Returns the plan that a run with this config executes; `spec` is the layer spec of Megatron's
    modules."""
    return plan_transfers(
        shape,
        fleet,
        padded_vocab=padded_vocab(shape.vocab, fleet.parallel.tensor),
        itemsize=_itemsize(config),
        round_bytes=config.sync.round_bytes,
        spec=spec,
        fmt=rollout_format(config, shape),
    )


def _itemsize(config: Config) -> int:
    return 4 if config.train.dtype == "fp32" else 2


def write_messages(plan: Plan, file: Path) -> None:
    """Writes every message between two ranks as a JSON array per line: [round, sender, receiver,
    bytes]."""
    columns = (plan.message_round, plan.message_sender, plan.message_receiver, plan.message_bytes)
    is_moved = plan.message_sender != plan.message_receiver
    with file.open("w", encoding="utf-8") as lines:
        for message in np.stack(columns, axis=1)[is_moved].tolist():
            lines.write(f"{json.dumps(message)}\n")


def _by_rank(plan: Plan, fleet: Fleet, cost: Cost) -> dict[str, Any]:
    """Returns the stage of each trainer rank, the bytes that each trainer rank sends and each
    engine rank receives, and the bytes from each stage to each replica (also local copies)."""
    stages = np.array([fleet.trainer_layout(rank).pp.rank for rank in range(fleet.trainers)])
    rows = plan.rows
    origin = stages[np.where(rows.via < 0, rows.sender, rows.via)]
    replica = (rows.receiver - fleet.first_receiver) // fleet.ranks_per_replica
    pairs = fleet.parallel.pipeline * fleet.replicas
    flows = plan.itemsize * sums_at(origin * fleet.replicas + replica, rows.numel, pairs)
    engines = slice(fleet.first_receiver, fleet.first_receiver + fleet.receivers)
    return {
        "stage_of_rank": stages.tolist(),
        "bytes_out_of_trainer_rank": cost.bytes_out[: fleet.trainers].tolist(),
        "bytes_in_of_engine_rank": cost.bytes_in[engines].tolist(),
        "bytes_between": flows.reshape(-1, fleet.replicas).tolist(),
    }


def describe_weights(figures: Mapping[str, Any]) -> str:
    """Returns the figures as text for the terminal."""
    trainer = figures["trainer"]
    engine = figures["engine"]
    gb = {name: value / 1e9 for name, value in figures.items() if isinstance(value, int)}
    where = "on separate GPUs" if figures["topology"] == "split" else "on the same GPUs"
    replicas = f"vLLM {engine['replicas']} x tp{engine['tensor']}"
    if engine["expert"] > 1:
        replicas += f" ep{engine['expert']}"
    memory = f"{gb['peak_extra_bytes']:.2f} GB (largest message {gb['largest_message_bytes']:.2f})"
    if figures["staged_bytes"]:
        memory += f", plus {gb['staged_bytes']:.2f} GB staged on device or host"
    lines = {
        "time on the wire": (
            f"{figures['predicted_seconds']:.3f} s, {figures['predicted_over_floor']:.2f}x the "
            f"floor of {figures['floor_seconds']:.3f} s"
        ),
        "busiest link": f"{figures['busiest_link_over_mean']:.3f}x the mean",
        "messages": f"{figures['num_messages']:,} in {figures['num_rounds']} rounds",
        "kept, received": f"{gb['bytes_kept']:,.1f} GB, {gb['bytes_received']:,.1f} GB",
        "relayed within nodes": f"{gb['bytes_relayed']:,.1f} GB of these",
        "peak extra memory": memory,
        "planned in": f"{figures['plan_seconds']:.1f} s",
    }
    stages = np.array(figures["stage_of_rank"])
    sent = np.array(figures["bytes_out_of_trainer_rank"])
    by_rank = {f"sent by stage {stage}": sent[stages == stage] for stage in np.unique(stages)}
    by_rank["received by engines"] = np.array(figures["bytes_in_of_engine_rank"])
    for name, sizes in by_rank.items():
        lines[name] = (
            f"{sizes.min() / 1e9:,.3f} to {sizes.max() / 1e9:,.3f} GB per rank "
            f"({len(sizes)} ranks), mean {sizes.mean() / 1e9:,.3f}"
        )
    head = (
        f"{figures['model']}, {gb['model_bytes']:,.0f} GB: Megatron {trainer['layout']} on "
        f"{trainer['gpus']} GPUs -> {replicas} {where}; {figures['gpu'].upper()} nodes of "
        f"{figures['ranks_per_node']}, 400G InfiniBand"
    )
    return "\n".join([head, *(f" {name:22}  {text}" for name, text in lines.items())])
