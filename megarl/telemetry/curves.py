"""Curves of metrics over steps: which ones a report shows, and how they are drawn.

    metrics.jsonl, eval.jsonl --run_panels, compared_panels--> Panels --draw_png--> one picture
                                                                      --svg-------> a picture per panel, for a page

A page may be dark or light: its SVG pictures refer to the colours of COLOURS by name, as CSS variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import cycle
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]

COLOURS = {  # name: on a light page, on a dark one
    "ink": ("#1f2933", "#e4e7eb"),
    "faint": ("#6b7785", "#98a4b3"),
    "grid": ("#e4e7eb", "#374151"),
    "page": ("#ffffff", "#15191f"),
    "blue": ("#2b6cb0", "#63b3ed"),
    "orange": ("#dd6b20", "#f6ad55"),
    "green": ("#2f855a", "#68d391"),
    "purple": ("#805ad5", "#b794f4"),
    "red": ("#c53030", "#fc8181"),
    "teal": ("#2c7a7b", "#4fd1c5"),
    "pink": ("#b83280", "#f687b3"),
    "brown": ("#975a16", "#ecc94b"),
}
INK, FAINT, GRID = (COLOURS[name][0] for name in ("ink", "faint", "grid"))
CURVE_COLOURS = tuple(COLOURS)[4:]

PANELS: dict[str, Mapping[str, str]] = {  # title: {metric: label}; panels without data are omitted
    "entropy": {"entropy": "entropy"},
    "gradient norm": {"grad_norm": "gradient norm"},
    "log-prob difference, trainer and engine": {
        "logprob_diff/mean": "mean",
        "logprob_diff/max": "max",
    },
    "KL divergence": {"kl/ref": "from the reference", "kl/rollout": "from the engine"},
    "KL from the teacher": {"kl/teacher": "on the samples", "kl/teacher_top_k": "of each token"},
    "response length, tokens": {"length/mean": "mean"},
    "loss": {"loss": "loss", "value/loss": "of the critic", "eval/loss": "held out"},
    "critic: explained variance": {"value/explained_variance": "explained variance"},
    "seconds": {f"time/{name}": name for name in ("step", "generate", "update", "publish")},
    "sampled tokens per second": {"tokens_per_second": "tokens/s"},
    "GPU power, W": {"gpu/power_w/mean": "mean", "gpu/power_w/max": "max"},
}
MAX_DRAWN = 1e100  # matplotlib's axes overflow near the largest float
HEADLINE = {
    "reward/accuracy/mean": "accuracy, sampled",
    "accuracy/sampled": "accuracy, sampled",
    "accuracy": "accuracy, before training on them",
    "reward/mean": "reward",
}
HELD_OUT = {
    "accuracy": "accuracy, held-out problems",
    "sampled_accuracy": "sampled accuracy, held-out problems",
}
COMPARED = {  # metric: title, where several runs are compared
    "reward/mean": "reward",
    "reward/accuracy/mean": "accuracy, sampled",
    "accuracy/sampled": "accuracy, sampled",
    "kl/ref": "KL from the reference",
    "kl/rollout": "KL from the engine",
    "length/mean": "response length, tokens",
    "length/truncated_frac": "truncated responses",
    "entropy": "entropy",
    "loss": "loss",
    "grad_norm": "gradient norm",
    "logprob_diff/max": "largest log-prob difference, trainer and engine",
    "time/step": "seconds per step",
    "tokens_per_second": "sampled tokens per second",
}


@dataclass(frozen=True, slots=True)
class Curve:
    label: str
    colour: str  # a name in COLOURS
    steps: Sequence[int]
    values: Sequence[float]
    is_sparse: bool = False  # measured now and then: points on a dotted line
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    curves: Sequence[Curve]
    scale: str = "linear"
    has_legend: bool = True


def run_panels(rows: Rows, evaluations: Rows) -> list[Panel]:
    """The panels of one run; the first is the most important."""
    headline = _curves(rows, HEADLINE) or _curves(rows, {"loss": "loss"})
    held_out = _curves(evaluations, HELD_OUT, is_sparse=True, skip=2)
    parts = {
        key: key[7:-5] for row in rows for key in row if re.fullmatch(r"(?s)reward/.+/mean", key)
    }
    panels = [Panel("reward and accuracy", [*headline, *held_out])]
    panels.append(Panel("held-out sets", _curves(evaluations, _sets(evaluations), is_sparse=True)))
    if len(parts) > 1:
        panels.append(
            Panel("reward by component, unweighted", _curves(rows, dict(sorted(parts.items()))))
        )
    panels += [
        Panel(title, _curves(rows, metrics), _scale(*metrics)) for title, metrics in PANELS.items()
    ]
    return [panels[0], *(panel for panel in panels[1:] if panel.curves)]


def _sets(evaluations: Rows) -> dict[str, str]:
    """The metrics of eval.sets, such as aime24/mean@16 and aime24/pass@8: those with an interval."""
    found = {key for row in evaluations for key in row if f"{key}/low" in row and "/" in key}
    return {key: key for key in sorted(found)}


def compared_panels(runs: Mapping[str, tuple[Rows, Rows]]) -> list[Panel]:
    """One panel per metric, with a curve for each run: {name: (metrics, evaluations)}."""
    held_out = HELD_OUT | _sets([row for _, evaluations in runs.values() for row in evaluations])
    shown = [(1, key, title) for key, title in held_out.items()] + [
        (0, key, title) for key, title in COMPARED.items()
    ]
    panels = []
    for source, key, title in shown:
        curves = [
            Curve(name, colour, *points, is_sparse=source == 1, is_dashed=is_dashed)
            for (name, run), (colour, is_dashed) in zip(
                runs.items(), run_styles(len(runs)), strict=True
            )
            if (points := _series(run[source], key))[0]
        ]
        if curves:
            panels.append(Panel(title, curves, _scale(key), has_legend=False))
    return panels


def _scale(*metrics: str) -> str:
    return "log" if metrics[0].startswith("logprob_diff") else "linear"


def run_styles(count: int) -> list[tuple[str, bool]]:
    """A colour for each run, and whether its line is dashed because the colour is in use."""
    return [(CURVE_COLOURS[i % len(CURVE_COLOURS)], i >= len(CURVE_COLOURS)) for i in range(count)]


def draw_png(panels: Sequence[Panel], title: str, file: Path) -> None:
    """Draws the first panel wide, and the others small below it."""
    from matplotlib.figure import Figure

    first, *others = panels
    lines = (len(others) + 2) // 3
    figure = Figure(figsize=(11, 3.6 + 2.1 * lines), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(1 + lines, 3, height_ratios=[1.7] + [1] * lines)
    axes = figure.add_subplot(grid[0, :])
    _draw(axes, first)
    if first.curves and len(first.curves[0].values) > 1:
        _label_ends(axes, first.curves[0])
    for index, panel in enumerate(others):
        _draw(figure.add_subplot(grid[1 + index // 3, index % 3]), panel)
    figure.suptitle(_plain(title, most=100), color=INK, fontsize=13, x=0.01, ha="left")
    figure.supxlabel("step", color=FAINT, fontsize=9)
    figure.savefig(file, dpi=130, format="png")


def svg(panel: Panel) -> str:
    """An <svg> element whose colours are CSS variables and whose text stays text."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(4.8, 2.6)
    )  # with fixed margins: a computed layout takes twice the time
    axes = figure.add_axes((0.11, 0.16, 0.87, 0.74 - 0.07 * _legend_lines(panel)))
    _draw(axes, panel)
    axes.set_xlabel("step", color=FAINT, fontsize=8)
    out = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    return themed(out.getvalue())


def themed(picture: str) -> str:
    """The <svg> element of an SVG file, with the colours of a light page replaced by CSS variables."""
    picture = picture[picture.index("<svg") :]
    for name, (light, _) in COLOURS.items():
        picture = picture.replace(light, f"var(--{name})")
    return picture


def _curves(
    rows: Rows, labels: Mapping[str, str], *, is_sparse: bool = False, skip: int = 0
) -> list[Curve]:
    colours = cycle(CURVE_COLOURS[skip:])
    series = [(label, _series(rows, key)) for key, label in labels.items()]
    return [
        Curve(label, next(colours), *points, is_sparse=is_sparse)
        for label, points in series
        if points[0]
    ]


def _series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    points = [
        (int(row["step"]), float(row[key])) for row in rows if isinstance(row.get(key), int | float)
    ]
    return [step for step, _ in points], [value for _, value in points]


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred running mean, shorter at the ends."""
    half = window // 2
    return [
        sum(part) / len(part)
        for i in range(len(values))
        if (part := values[max(0, i - half) : i + half + 1])
    ]


def _plain(text: str, *, most: int = 40) -> str:
    """Short text on one line, without matplotlib's formulas and characters that fonts lack."""
    text = "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))
    return (text if len(text) <= most else f"{text[: most - 1]}…").replace("$", r"\$")


def _draw(axes: Any, panel: Panel) -> None:
    lowest = 0 if panel.scale == "log" else -MAX_DRAWN
    for curve in panel.curves:
        points = zip(curve.steps, curve.values, strict=True)
        drawn = [(step, value) for step, value in points if lowest < value < MAX_DRAWN]
        _draw_curve(axes, curve, [step for step, _ in drawn], [value for _, value in drawn])
    lines = _legend_lines(panel)
    axes.set_title(
        _plain(panel.title, most=60), fontsize=9.5, color=INK, loc="left", pad=6 + 13 * lines
    )
    if panel.scale == "log" and any(line.get_ydata().size for line in axes.lines):
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_formatter(
            "{x:g}"
        )  # 5e-11, where the default writes 1e-11 over the title
    if lines:  # above the curves, which it would hide
        style = {
            "frameon": False,
            "fontsize": 8,
            "labelcolor": INK,
            "borderpad": 0,
            "labelspacing": 0.3,
        }
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncols=2, borderaxespad=0, **style)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=FAINT, labelsize=8, length=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)


def _legend_lines(panel: Panel) -> int:
    """Two curves a line."""
    return (len(panel.curves) + 1) // 2 if panel.has_legend and len(panel.curves) > 1 else 0


def _draw_curve(axes: Any, curve: Curve, steps: list[int], values: list[float]) -> None:
    colour, label = COLOURS[curve.colour][0], _plain(curve.label)
    if curve.is_sparse:
        axes.plot(steps, values, "D:", color=colour, linewidth=0.9, markersize=5, label=label)
        return
    marker = "o" if len(values) < 12 else None
    if len(values) >= 24:  # a running mean in front of the values
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.9)
        values = _smooth(values, max(5, len(values) // 15))
    style = "--" if curve.is_dashed else "-"
    axes.plot(
        steps,
        values,
        style,
        color=colour,
        linewidth=1.7,
        label=label,
        marker=marker,
        markersize=3.5,
    )


def _label_ends(axes: Any, curve: Curve) -> None:
    """Annotates a curve with its first and last value."""
    steps, values = curve.steps, curve.values
    few = max(1, len(values) // 20)
    style = {"va": "top", "fontsize": 9, "color": COLOURS[curve.colour][0], "weight": "bold"}
    for step, ends, side in ((steps[0], values[:few], "left"), (steps[-1], values[-few:], "right")):
        mean = sum(ends) / few
        axes.annotate(
            f"{mean:.2f}",
            (step, mean),
            textcoords="offset points",
            xytext=(0, -7),
            ha=side,
            **style,
        )
