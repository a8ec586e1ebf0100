"""A weights plan as a picture: pipeline stages on the left, engine replicas on the right, ribbons as wide as the bytes.

    the JSON of `megarl plan --weights` --draw_flows--> .png | .svg

A box's height is what its GPUs send or keep together; the strip beside it has a line for each GPU, dark where it
moves most, so a busy link shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw_flows"]

INK, FAINT = "#1f2933", "#7b8794"
LEFT, RIGHT, BOX, STRIP = 0.0, 1.0, 0.035, 0.02  # x of the boxes' inner edges, and widths
GAP = 0.012  # between boxes, of the height


def draw_flows(plan: Mapping[str, Any], file: Path) -> None:
    """Raises ValueError for a file that is neither .png nor .svg."""
    if file.suffix not in (".png", ".svg"):
        raise ValueError(f"--figure {file}: a picture is a .png or a .svg; name one")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    between = plan["bytes_between"]  # [stage, replica]
    num_boxes = max(len(between), len(between[0]))
    size = (10, min(14, 3 + 0.42 * num_boxes))
    figure, axes = plt.subplots(figsize=size, layout="constrained", facecolor="white")
    palette = matplotlib.colormaps["viridis"]
    colours = [palette(0.1 + 0.8 * stage / max(1, len(between) - 1)) for stage in range(len(between))]
    left = _spans([sum(row) for row in between])
    right = _spans([sum(column) for column in zip(*between, strict=True)])
    _ribbons(axes, between, left, right, colours)
    out, stages = plan["bytes_out_of_trainer_rank"], plan["stage_of_rank"]
    taken, size = plan["bytes_in_of_engine_rank"], len(plan["bytes_in_of_engine_rank"]) // len(right)
    for stage, span in enumerate(left):
        ranks = [count for count, of in zip(out, stages, strict=True) if of == stage]
        _box(axes, span, LEFT - BOX, colours[stage])
        _strip(axes, span, LEFT - BOX - STRIP, ranks, max(out))
        _label(axes, span, LEFT - BOX - STRIP - 0.01, f"stage {stage}: {len(ranks)} x {_amount(*ranks)}", "right")
    for replica, span in enumerate(right):
        ranks = taken[replica * size : (replica + 1) * size]
        _box(axes, span, RIGHT, INK)
        _strip(axes, span, RIGHT + BOX, ranks, max(taken))
        _label(axes, span, RIGHT + BOX + STRIP + 0.01, f"replica {replica}: {len(ranks)} x {_amount(*ranks)}", "left")
    axes.set_xlim(-0.42, 1.42)
    axes.set_ylim(1.01, -0.01)
    axes.axis("off")
    figure.suptitle(_title(plan), color=INK, fontsize=12, x=0.01, ha="left")
    figure.supxlabel("what a GPU sends (left) and receives (right) in one sync, least to most", color=FAINT, fontsize=9)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _title(plan: Mapping[str, Any]) -> str:
    trainer, engine = plan["trainer"], plan["engine"]
    return (
        f"{plan['model']}, {_amount(plan['model_bytes'])}: {trainer['layout']} on {trainer['gpus']} GPUs to "
        f"{engine['replicas']} x tp{engine['tensor']}\n"
        f"{plan['predicted_seconds']:.3g} s on {plan['gpu'].upper()} links ({plan['predicted_over_floor']:.2f}x "
        f"the floor), busiest link {plan['busiest_link_over_mean']:.2f}x the mean"
    )


def _amount(*counts: int) -> str:
    """Bytes, least to most."""
    least, most = min(counts), max(counts)
    size, unit = next((pair for pair in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if most >= pair[0] / 2), (1.0, "B"))
    shown = f"{most / size:,.4g} {unit}"
    return shown if f"{least / size:,.4g} {unit}" == shown else f"{least / size:,.4g}-{shown}"


def _spans(totals: Sequence[int]) -> list[tuple[float, float]]:
    """Top and bottom of each box; heights in proportion, gaps between."""
    free, whole, at, found = 1 - GAP * (len(totals) - 1), sum(totals) or 1, 0.0, []
    for total in totals:
        found.append((at, at + free * total / whole))
        at = found[-1][1] + GAP
    return found


def _ribbons(axes: Any, between: Sequence[Sequence[int]], left: Any, right: Any, colours: Sequence[Any]) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    taken = [span[0] for span in right]
    for stage, row in enumerate(between):
        sent, total = left[stage][0], sum(row) or 1
        for replica, count in enumerate(row):
            if not count:
                continue
            column = sum(of[replica] for of in between)
            here = (left[stage][1] - left[stage][0]) * count / total
            there = (right[replica][1] - right[replica][0]) * count / column
            top, bottom = (sent, taken[replica]), (sent + here, taken[replica] + there)
            sent, taken[replica] = bottom
            points = [
                (LEFT, top[0]), (0.5, top[0]), (0.5, top[1]), (RIGHT, top[1]),
                (RIGHT, bottom[1]), (0.5, bottom[1]), (0.5, bottom[0]), (LEFT, bottom[0]), (LEFT, top[0]),
            ]  # fmt: skip
            codes = [Curve.MOVETO, *[Curve.CURVE4] * 3, Curve.LINETO, *[Curve.CURVE4] * 3, Curve.CLOSEPOLY]
            axes.add_patch(PathPatch(Curve(points, codes), facecolor=colours[stage], alpha=0.45, linewidth=0))


def _box(axes: Any, span: tuple[float, float], x: float, colour: Any) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, span[0]), BOX, span[1] - span[0], facecolor=colour, linewidth=0))


def _strip(axes: Any, span: tuple[float, float], x: float, ranks: Sequence[int], most: int) -> None:
    import matplotlib
    from matplotlib.patches import Rectangle

    shade, height = matplotlib.colormaps["Greys"], (span[1] - span[0]) / len(ranks)
    for number, count in enumerate(ranks):
        place = (x, span[0] + number * height)
        axes.add_patch(Rectangle(place, STRIP, height, facecolor=shade(0.1 + 0.8 * count / (most or 1)), linewidth=0))


def _label(axes: Any, span: tuple[float, float], x: float, text: str, side: str) -> None:
    axes.text(x, (span[0] + span[1]) / 2, text, ha=side, va="center", fontsize=8, color=INK)
