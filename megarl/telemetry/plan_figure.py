"""Draws a weight sync: pipeline stages on the left, engine replicas on the right, ribbons as wide as the bytes.

    the JSON of `megarl plan --weights` --draw_plan--> .png | .svg

The height of a box is the number of bytes that its GPUs send or keep; its label gives the range over those GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.telemetry.curves import FAINT, INK

BOX = 0.035  # width; the inner edges of the boxes are at x = 0 and 1
GAP = 0.012  # between boxes, as a fraction of the height

Span = tuple[float, float]  # top and bottom


def draw_plan(figures: Mapping[str, Any], file: Path) -> None:
    """Raises ValueError for a file that is neither .png nor .svg."""
    if file.suffix not in (".png", ".svg"):
        raise ValueError(f"--figure {file} must be a .png or .svg file")
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    between = figures["bytes_between"]  # [stage, replica]
    sent, received = figures["bytes_out_of_trainer_rank"], figures["bytes_in_of_engine_rank"]
    height = min(14, 3 + 0.42 * max(len(between), len(between[0])))
    picture = Figure(figsize=(10, height), layout="constrained", facecolor="white")
    axes = picture.subplots()
    colours = [
        colormaps["viridis"](0.1 + 0.8 * stage / max(1, len(between) - 1))
        for stage in range(len(between))
    ]
    left = _spans([sum(row) for row in between])
    right = _spans([sum(column) for column in zip(*between, strict=True)])
    _draw_ribbons(axes, between, left, right, colours)
    for stage, span in enumerate(left):
        ranks = [
            size
            for size, number in zip(sent, figures["stage_of_rank"], strict=True)
            if number == stage
        ]
        _draw_box(axes, span, -1, colours[stage], f"stage {stage}", ranks)
    count = len(received) // len(right)  # ranks of a replica
    for replica, span in enumerate(right):
        _draw_box(
            axes,
            span,
            1,
            INK,
            f"replica {replica}",
            received[replica * count : (replica + 1) * count],
        )
    axes.set(xlim=(-0.42, 1.42), ylim=(1.01, -0.01))
    axes.axis("off")
    picture.suptitle(_title(figures), color=INK, fontsize=12, x=0.01, ha="left")
    picture.supxlabel(
        "bytes sent (left) and received (right) per GPU in one sync, min to max",
        color=FAINT,
        fontsize=9,
    )
    picture.savefig(file, dpi=130)


def _title(figures: Mapping[str, Any]) -> str:
    trainer, engine = figures["trainer"], figures["engine"]
    return (
        f"{figures['model']}, {_amount(figures['model_bytes'])}: {trainer['layout']} on {trainer['gpus']} GPUs to "
        f"{engine['replicas']} x tp{engine['tensor']}\n"
        f"{figures['predicted_seconds']:.3g} s on {figures['gpu'].upper()} links "
        f"({figures['predicted_over_floor']:.2f}x the floor), "
        f"busiest link {figures['busiest_link_over_mean']:.2f}x the mean"
    )


def _amount(*counts: int) -> str:
    """The range of `counts` bytes in a suitable unit."""
    low, high = min(counts), max(counts)
    size, unit = next(
        (pair for pair in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if high >= pair[0] / 2),
        (1.0, "B"),
    )
    first, last = (f"{count / size:,.4g}" for count in (low, high))
    return f"{last} {unit}" if first == last else f"{first}-{last} {unit}"


def _spans(totals: Sequence[int]) -> list[Span]:
    """Boxes whose heights are proportional to `totals`, separated by gaps."""
    free, total, top, spans = 1 - GAP * (len(totals) - 1), sum(totals) or 1, 0.0, []
    for count in totals:
        spans.append((top, top + free * count / total))
        top = spans[-1][1] + GAP
    return spans


def _draw_ribbons(
    axes: Any, between: Sequence[Sequence[int]], left: Any, right: Any, colours: Sequence[Any]
) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    columns = [sum(column) or 1 for column in zip(*between, strict=True)]
    codes = [Curve.MOVETO, *[Curve.CURVE4] * 3, Curve.LINETO, *[Curve.CURVE4] * 3, Curve.CLOSEPOLY]
    ends = [top for top, _ in right]
    for stage, row in enumerate(between):
        start, total = left[stage][0], sum(row) or 1
        for replica, count in enumerate(row):
            top = (start, ends[replica])
            start += (left[stage][1] - left[stage][0]) * count / total
            ends[replica] += (right[replica][1] - right[replica][0]) * count / columns[replica]
            points = [(0, top[0]), (0.5, top[0]), (0.5, top[1]), (1, top[1])]
            points += [
                (1, ends[replica]),
                (0.5, ends[replica]),
                (0.5, start),
                (0, start),
                (0, top[0]),
            ]
            axes.add_patch(
                PathPatch(Curve(points, codes), facecolor=colours[stage], alpha=0.45, linewidth=0)
            )


def _draw_box(
    axes: Any, span: Span, side: int, colour: Any, name: str, ranks: Sequence[int]
) -> None:
    """`side`: -1 left, 1 right. `ranks`: bytes of each GPU."""
    edge, align = 0.5 + 0.5 * side, "right" if side < 0 else "left"
    axes.barh(span[0], side * BOX, span[1] - span[0], left=edge, align="edge", color=colour)
    text = f"{name}: {len(ranks)} x {_amount(*ranks)}"
    axes.text(
        edge + side * (BOX + 0.01),
        sum(span) / 2,
        text,
        ha=align,
        va="center",
        fontsize=8,
        color=INK,
    )
