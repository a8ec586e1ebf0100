"""Draws a weight sync: the bytes from each pipeline stage (rows) to each engine replica (columns).

The labels give the number of bytes that each GPU of a stage sends or of a replica receives.
"""

from typing import TYPE_CHECKING

import numpy as np
from rich.filesize import decimal

from megarl.telemetry.metrics import NamedValues

if TYPE_CHECKING:  # `megarl plan` without a figure needs no matplotlib
    from matplotlib.figure import Figure


def draw_plan(figures: NamedValues) -> "Figure":
    """Returns the figure; `figures` is the output of `megarl plan --weights --json`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    between = np.array(figures["bytes_between"])  # [stage, replica]
    num_stages, num_replicas = between.shape
    sent = np.array(figures["bytes_out_of_trainer_rank"])
    stage_of_rank = np.array(figures["stage_of_rank"])
    received = np.array(figures["bytes_in_of_engine_rank"]).reshape(num_replicas, -1)
    picture = Figure(figsize=(10, 6), layout="constrained", facecolor="white")
    axes = picture.subplots()
    image = axes.imshow(between, aspect="auto", vmin=0)
    picture.colorbar(image, label="bytes in one sync", format=EngFormatter("B"))
    axes.set_yticks(
        range(num_stages),
        [_label(f"stage {stage}", sent[stage_of_rank == stage]) for stage in range(num_stages)],
        fontsize=8,
    )
    axes.set_xticks(
        range(num_replicas),
        [_label(f"replica {replica}", ranks) for replica, ranks in enumerate(received)],
        fontsize=8,
        rotation=90,
    )
    axes.set_ylabel("sent per GPU, min to max")
    axes.set_xlabel("received per GPU, min to max")
    picture.suptitle(_title(figures), fontsize=12)
    return picture


def _title(figures: NamedValues) -> str:
    trainer = figures["trainer"]
    engine = figures["engine"]
    return (
        f"{figures['model']}, {decimal(figures['model_bytes'])}: {trainer['layout']} on "
        f"{trainer['gpus']} GPUs to "
        f"{engine['replicas']} x tp{engine['tensor']}\n"
        f"{figures['predicted_seconds']:.3g} s on {figures['gpu'].upper()} links "
        f"({figures['predicted_over_floor']:.2f}x the floor), "
        f"busiest link {figures['busiest_link_over_mean']:.2f}x the mean"
    )


def _label(name: str, ranks: np.ndarray) -> str:
    return f"{name}: {len(ranks)} x {decimal(min(ranks))} to {decimal(max(ranks))}"
