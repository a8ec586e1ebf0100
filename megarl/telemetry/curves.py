"""Curves of metrics over steps: which ones a report shows, and how they are drawn.

metrics.jsonl, eval.jsonl --run_panels, compared_panels--> Panels --draw_png--> one picture
                                                   Panels --svg--> a picture per panel
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import chain, cycle, product
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

JsonRows = Sequence[Mapping[str, Any]]
Points = Sequence[tuple[int, float]]  # step, value

CHARTS = yaml.safe_load(Path(__file__).with_name("curves.yaml").read_text(encoding="utf-8"))
COLOURS = CHARTS["colours"]
STYLE = Path(__file__).with_name("curves.mplstyle")
MAX_POINTS = 1000  # of a curve that are drawn
MAX_DRAWN = 1e100  # matplotlib's axes overflow near the largest float


@dataclass(frozen=True)
class Curve:
    label: str
    colour: str
    points: Points
    is_sparse: bool = False  # measured now and then: points on a dotted line
    is_dashed: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    curves: Sequence[Curve]
    is_log: bool = False  # the axis of the values
    has_legend: bool = True


def run_panels(rows: JsonRows, evaluations: JsonRows) -> list[Panel]:
    """The panels of one run; the first is the most important."""
    headline = _curves(rows, CHARTS["headline"]) or _curves(rows, {"loss": "loss"})
    held_out = _curves(evaluations, CHARTS["held_out"], is_sparse=True, skip=2)
    parts = {
        key: key[7:-5]
        for key in sorted(set(chain.from_iterable(rows)))
        if re.fullmatch(r"(?s)reward/(?!sampled/).+/mean", key)
    }
    panels = [
        Panel("reward and accuracy", [*headline, *held_out]),
        Panel("held-out sets", _curves(evaluations, _sets(evaluations), is_sparse=True)),
    ]
    if len(parts) > 1:
        panels.append(Panel("reward by component, unweighted", _curves(rows, parts)))
    panels += [
        Panel(title, _curves(rows, metrics), "logprob_diff/max" in metrics)
        for title, metrics in CHARTS["panels"].items()
    ]
    return [panels[0], *(panel for panel in panels[1:] if panel.curves)]


def _sets(evaluations: JsonRows) -> dict[str, str]:
    """The metrics of eval.sets, such as aime24/mean@16 and aime24/pass@8: those with
    an interval.
    """
    keys = set(chain.from_iterable(evaluations))
    return {key: key for key in sorted(keys) if f"{key}/low" in keys and "/" in key}


def compared_panels(runs: Mapping[str, tuple[JsonRows, JsonRows]]) -> list[Panel]:
    """One panel per metric, with a curve for each run: {name: (metrics, evaluations)}."""
    held_out = CHARTS["held_out"] | _sets(
        list(chain.from_iterable(evaluations for _, evaluations in runs.values()))
    )
    panels = []
    for source, titles in ((1, held_out), (0, CHARTS["compared"])):
        for key, title in titles.items():
            curves = []
            for name, (is_dashed, colour) in run_styles(runs).items():
                points = _series(runs[name][source], key)
                if points:
                    curves.append(Curve(name, colour, points, source == 1, is_dashed))
            if curves:
                is_log = key.startswith("logprob_diff")
                panels.append(Panel(title, curves, is_log, has_legend=False))
    return panels


def run_styles(names: Iterable[str]) -> dict[str, tuple[bool, str]]:
    """Each run's line: if it is dashed, because its colour is in use, and the colour."""
    return dict(zip(names, cycle(product((False, True), COLOURS))))


def draw_png(panels: Sequence[Panel], title: str, file: Path) -> None:
    """Draws the first panel wide, and the others small below it."""
    from matplotlib import style
    from matplotlib.figure import Figure

    first, *others = panels
    lines = (len(others) + 2) // 3
    with style.context(STYLE):
        figure = Figure(figsize=(11, 3.6 + 2.1 * lines), layout="constrained")
        grid = figure.add_gridspec(1 + lines, 3, height_ratios=[1.7] + [1] * lines)
        axes = figure.add_subplot(grid[0, :])
        _draw(axes, first)
        if first.curves and len(first.curves[0].points) > 1:
            _label_ends(axes, first.curves[0])
        for index, panel in enumerate(others):
            _draw(figure.add_subplot(grid[1 + index // 3, index % 3]), panel)
        figure.suptitle(_plain(title, most=100), fontsize=13, x=0.01, ha="left")
        figure.supxlabel("step", fontsize=9)
        figure.savefig(file, dpi=130, format="png")


def svg(panel: Panel) -> str:
    """An <svg> element whose text stays text."""
    from matplotlib import style
    from matplotlib.figure import Figure

    out = StringIO()
    with style.context(STYLE):
        figure = Figure(figsize=(4.8, 2.6), layout="constrained")
        axes = figure.subplots()
        _draw(axes, panel)
        axes.set_xlabel("step")
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    return svg_element(out.getvalue())


def svg_element(picture: str) -> str:
    """The <svg> element of an SVG file."""
    return picture[picture.index("<svg") :]


def _curves(
    rows: JsonRows, labels: Mapping[str, str], *, is_sparse: bool = False, skip: int = 0
) -> list[Curve]:
    colours = cycle(COLOURS[skip:])
    series = [(label, _series(rows, key)) for key, label in labels.items()]
    return [Curve(label, next(colours), points, is_sparse) for label, points in series if points]


def _series(rows: JsonRows, key: str) -> Points:
    return [(row["step"], float(row[key])) for row in rows if isinstance(row.get(key), int | float)]


def _plain(text: str, *, most: int = 40) -> str:
    """Short text on one line, without matplotlib's formulas and characters that fonts lack."""
    text = "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))
    return (text if len(text) <= most else f"{text[: most - 1]}…").replace("$", r"\$")


def _draw(axes: Any, panel: Panel) -> None:
    lowest = 0 if panel.is_log else -MAX_DRAWN
    for curve in panel.curves:
        drawn = [(step, value) for step, value in curve.points if lowest < value < MAX_DRAWN]
        _draw_curve(axes, curve, drawn)
    axes.set_title(_plain(panel.title, most=60))
    if panel.is_log and any(line.get_ydata().size for line in axes.lines):
        axes.set_yscale("log")
    else:
        # 5e-11, where the default writes 1e-11 over the title
        axes.yaxis.set_major_formatter("{x:g}")
    if panel.has_legend and len(panel.curves) > 1:
        axes.legend()
    axes.xaxis.get_major_locator().set_params(integer=True)


def _thin(points: Points) -> tuple[Points, Points]:
    """Returns the lowest and the highest point of each of MAX_POINTS parts of a curve, and the
    means of the parts. A shorter curve stays as it is.
    """
    size = -(-len(points) // MAX_POINTS)
    if size < 2:
        return points, points
    extremes = []
    means = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        extremes += sorted(pick(part, key=itemgetter(1)) for pick in (min, max))
        means.append((part[0][0], fmean(value for _, value in part)))
    return extremes, means


def _draw_curve(axes: Any, curve: Curve, points: Points) -> None:
    colour = curve.colour
    label = _plain(curve.label)
    extremes, means = _thin(points)
    steps = [step for step, _ in means]
    values = [value for _, value in means]
    if curve.is_sparse:
        axes.plot(steps, values, "D:", color=colour, linewidth=0.9, markersize=5, label=label)
        return
    if len(values) >= 24:  # a running mean in front of the values
        axes.plot(*zip(*extremes, strict=True), color=colour, alpha=0.25, linewidth=0.9)
        half = max(5, len(values) // 15) // 2  # of the window, which is shorter at the ends
        parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
        values = [sum(part) / len(part) for part in parts]
    axes.plot(
        steps,
        values,
        "--" if curve.is_dashed else "-",
        color=colour,
        linewidth=1.7,
        label=label,
        marker="o" if len(values) < 12 else None,
        markersize=3.5,
    )


def _label_ends(axes: Any, curve: Curve) -> None:
    """Annotates a curve with its first and last value."""
    points = curve.points
    few = max(1, len(points) // 20)
    for end, nearest, side in ((0, points[:few], "left"), (-1, points[-few:], "right")):
        mean = fmean(value for _, value in nearest)
        axes.annotate(
            f"{mean:.2f}",
            (nearest[end][0], mean),
            textcoords="offset points",
            xytext=(0, -7),
            ha=side,
            va="top",
            fontsize=9,
            color=curve.colour,
            weight="bold",
        )
