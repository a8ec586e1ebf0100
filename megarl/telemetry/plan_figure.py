"""Draws a weight sync: pipeline stages on the left, engine replicas on the right, ribbons as wide
as the bytes.

    the JSON of `megarl plan --weights` --draw_plan--> .png | .svg

The height of a box is the number of bytes that its GPUs send or keep; its label gives the range
over those GPUs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

BOX = 0.035  # width; the inner edges of the boxes are at x = 0 and 1
GAP = 0.012  # between boxes, as a fraction of the height

Span = tuple[float, float]  # top and height


def draw_plan(figures: Mapping[str, Any], file: Path) -> None:
    """Raises ValueError for a file that is neither .png nor .svg."""
    if file.suffix not in (".png", ".svg"):
        raise ValueError(f"--figure {file} must be a .png or .svg file")
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    between = np.array(figures["bytes_between"])  # [stage, replica]
    sent = np.array(figures["bytes_out_of_trainer_rank"])
    stage_of_rank = np.array(figures["stage_of_rank"])
    received = figures["bytes_in_of_engine_rank"]
    height = min(14, 3 + 0.42 * max(between.shape))
    picture = Figure(figsize=(10, height), layout="constrained", facecolor="white")
    axes = picture.subplots()
    colours = colormaps["viridis"](np.linspace(0.1, 0.9, len(between)))
    left = _spans(between.sum(1))
    right = _spans(between.sum(0))
    _draw_ribbons(axes, between, left, right, colours)
    for stage, span in enumerate(left):
        ranks = sent[stage_of_rank == stage]
        _draw_box(axes, span, -1, colours[stage], f"stage {stage}", ranks)
    count = len(received) // len(right)  # ranks of a replica
    for replica, span in enumerate(right):
        ranks = received[replica * count : (replica + 1) * count]
        _draw_box(axes, span, 1, "0.2", f"replica {replica}", ranks)
    axes.set(xlim=(-0.42, 1.42), ylim=(1.01, -0.01))
    axes.axis("off")
    picture.suptitle(_title(figures), fontsize=12, x=0.01, ha="left")
    picture.supxlabel(
        "bytes sent (left) and received (right) per GPU in one sync, min to max", fontsize=9
    )
    picture.savefig(file, dpi=130, transparent=file.suffix == ".svg")


def _title(figures: Mapping[str, Any]) -> str:
    trainer = figures["trainer"]
    engine = figures["engine"]
    return (
        f"{figures['model']}, {_amount(figures['model_bytes'])}: {trainer['layout']} on "
        f"{trainer['gpus']} GPUs to "
        f"{engine['replicas']} x tp{engine['tensor']}\n"
        f"{figures['predicted_seconds']:.3g} s on {figures['gpu'].upper()} links "
        f"({figures['predicted_over_floor']:.2f}x the floor), "
        f"busiest link {figures['busiest_link_over_mean']:.2f}x the mean"
    )


def _amount(*counts: int) -> str:
    """The range of `counts` bytes in a suitable unit."""
    high = max(counts)
    size, unit = next(
        (pair for pair in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if high >= pair[0] / 2),
        (1.0, "B"),
    )
    first, last = (f"{count / size:,.4g}" for count in (min(counts), high))
    return f"{last} {unit}" if first == last else f"{first}-{last} {unit}"


def _spans(totals: Any) -> list[Span]:
    """Boxes whose heights are proportional to `totals`, separated by gaps."""
    heights = (1 - GAP * (len(totals) - 1)) * totals / max(totals.sum(), 1)
    tops = np.cumsum(heights + GAP) - heights - GAP
    return list(zip(tops, heights, strict=True))


def _draw_ribbons(
    axes: Any, between: Any, left: Sequence[Span], right: Sequence[Span], colours: Any
) -> None:
    x = np.linspace(0, 1, 25)
    bend = x**2 * (3 - 2 * x)  # from 0 to 1
    columns = between.sum(0).clip(1)
    ends = [top for top, _ in right]
    for row, (end, height), colour in zip(between, left, colours, strict=True):
        total = row.sum().clip(1)
        for replica, count in enumerate(row):
            left_top = end
            right_top = ends[replica]
            end += height * count / total
            right_end = right_top + right[replica][1] * count / columns[replica]
            ends[replica] = right_end
            top = left_top + (right_top - left_top) * bend
            bottom = end + (right_end - end) * bend
            axes.fill_between(x, top, bottom, color=colour, alpha=0.45, linewidth=0)


def _draw_box(axes: Any, span: Span, side: int, colour: Any, name: str, ranks: Any) -> None:
    """`side`: -1 left, 1 right. `ranks`: bytes of each GPU."""
    top, height = span
    edge = 0.5 + 0.5 * side
    axes.barh(top, side * BOX, height, left=edge, align="edge", color=colour)
    axes.text(
        edge + side * (BOX + 0.01),
        top + height / 2,
        f"{name}: {len(ranks)} x {_amount(*ranks)}",
        ha="right" if side < 0 else "left",
        va="center",
        fontsize=8,
    )
