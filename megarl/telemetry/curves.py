"""Selects and draws the metric curves of a report.

metrics.jsonl, eval.jsonl --run_panels, compared_panels--> Panels --draw_png--> one image
                                                           Panel  --svg-------> one image each
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import chain, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from megarl.telemetry.metrics import NamedValues

if TYPE_CHECKING:  # matplotlib takes a second to import
    from matplotlib.figure import Figure

JsonRows = Sequence[NamedValues]
Points = Sequence[tuple[int, float]]  # step, value

CHARTS = yaml.safe_load(Path(__file__).with_name("curves.yaml").read_text(encoding="utf-8"))
STYLE = Path(__file__).with_name("curves.mplstyle")
MAX_DRAWN = 1e100  # matplotlib's axes overflow near the largest float
MIN_KL = 1e-9  # below it, a KL divergence is the rounding error of equal distributions


@dataclass(frozen=True)
class Curve:
    label: str
    points: Points
    is_sparse: bool = False  # not measured at every step: drawn as markers on a dotted line


@dataclass(frozen=True)
class Panel:
    title: str
    curves: Sequence[Curve]
    is_log: bool = False  # logarithmic value axis
    has_legend: bool = True


def run_panels(rows: JsonRows, evaluations: JsonRows) -> list[Panel]:
    """Returns the panels of one run: reward and accuracy first; others only if they have data."""
    headline = _curves(rows, CHARTS["headline"]) or _curves(rows, {"loss": "loss"})
    held_out = _curves(evaluations, CHARTS["held_out"], is_sparse=True)
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
    """Returns {metric: label} of the metrics of eval.sets that have an interval, for example
    aime24/mean@16 and aime24/pass@8.
    """
    keys = set(chain.from_iterable(evaluations))
    return {key: key for key in sorted(keys) if f"{key}/low" in keys and "/" in key}


def compared_panels(runs: Mapping[str, tuple[JsonRows, JsonRows]]) -> list[Panel]:
    """Returns one panel per metric, with a curve for each run.

    `runs` is {name: (rows of metrics.jsonl, rows of eval.jsonl)}.
    """
    held_out = CHARTS["held_out"] | _sets(
        list(chain.from_iterable(evaluations for _, evaluations in runs.values()))
    )
    panels = []
    for source, titles in ((1, held_out), (0, CHARTS["compared"])):
        for key, title in titles.items():
            # include runs without points, so that a run has the same line style in every panel
            curves = [
                Curve(name, _series(run[source], key), source == 1) for name, run in runs.items()
            ]
            if any(curve.points for curve in curves):
                is_log = key.startswith("logprob_diff")
                panels.append(Panel(title, curves, is_log, has_legend=False))
    return panels


def line_styles(names: Iterable[str]) -> dict[str, Mapping[str, str]]:
    """Returns {run: colour and line style}, the same in every panel."""
    from matplotlib import rc_params_from_file

    styles = rc_params_from_file(STYLE, use_default_template=False)["axes.prop_cycle"]
    return dict(zip(names, cycle(styles)))


def draw_png(panels: Sequence[Panel], title: str, file: Path) -> None:
    """Draws all panels as one PNG: the first over the full width, the others in a grid below."""
    from matplotlib import style
    from matplotlib.figure import Figure

    first, *others = panels
    lines = (len(others) + 2) // 3
    with style.context(STYLE):
        figure = Figure(figsize=(11, 3.6 + 2.1 * lines), layout="constrained")
        grid = figure.add_gridspec(1 + lines, 3, height_ratios=[1.7] + [1] * lines)
        _draw(figure.add_subplot(grid[0, :]), first)
        for index, panel in enumerate(others):
            axes = figure.add_subplot(grid[1 + index // 3, index % 3])
            _draw(axes, panel)
            if index + 3 >= len(others):  # the lowest of its column
                axes.set_xlabel("step")
        figure.suptitle(_plain(title, most=100), fontsize=13, x=0.01, ha="left")
        figure.savefig(file, dpi=130, format="png")


def svg(panel: Panel) -> str:
    """Draws a panel; returns an <svg> element."""
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(STYLE):
        figure = Figure(figsize=(4.8, 2.6), layout="constrained")
        axes = figure.subplots()
        _draw(axes, panel)
        axes.set_xlabel("step")
        return svg_element(figure)


def svg_element(figure: "Figure") -> str:
    out = StringIO()
    figure.savefig(out, format="svg", transparent=True)
    picture = out.getvalue()
    return picture[picture.index("<svg") :]


def _curves(rows: JsonRows, labels: Mapping[str, str], *, is_sparse: bool = False) -> list[Curve]:
    curves = [Curve(label, _series(rows, key), is_sparse) for key, label in labels.items()]
    return [curve for curve in curves if curve.points]


def _series(rows: JsonRows, key: str) -> Points:
    """Returns the points of a metric; none of a KL divergence that is 0 throughout, up to
    rounding: the run has no such term.
    """
    points = [
        (row["step"], float(row[key])) for row in rows if isinstance(row.get(key), int | float)
    ]
    if key.startswith("kl/") and all(abs(value) < MIN_KL for _, value in points):
        return []
    return points


def _plain(text: str, *, most: int = 40) -> str:
    """Returns `text` on one line, truncated to `most` characters, safe for matplotlib.

    Replaces non-printable characters and escapes "$", which would begin a formula.
    """
    text = "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))
    return (text if len(text) <= most else f"{text[: most - 1]}…").replace("$", r"\$")


def _draw(axes: Any, panel: Panel) -> None:
    lowest = 0 if panel.is_log else -MAX_DRAWN
    for curve in panel.curves:
        drawn = [(step, value) for step, value in curve.points if lowest < value < MAX_DRAWN]
        _draw_curve(axes, curve, np.array(drawn).reshape(-1, 2).T)
    axes.set_title(_plain(panel.title, most=60))
    if panel.is_log and any(line.get_ydata().size for line in axes.lines):
        axes.set_yscale("log")
    else:
        # label ticks "5e-11"; the default would write the factor "1e-11" over the title
        axes.yaxis.set_major_formatter("{x:g}")
    if panel.has_legend and len(panel.curves) > 1:
        axes.legend()
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_curve(axes: Any, curve: Curve, points: np.ndarray) -> None:
    steps, values = points
    label = _plain(curve.label)
    if curve.is_sparse:
        axes.plot(steps, values, "D:", linewidth=0.9, markersize=5, label=label)
        return
    count = len(values)
    means = values
    if count >= 24:  # draw a running mean in front of the values
        window = np.ones(max(5, count // 15) // 2 * 2 + 1)  # truncated at both ends
        means = np.convolve(values, window, "same") / np.convolve(np.ones(count), window, "same")
    (line,) = axes.plot(steps, means, label=label, marker="o" if count < 12 else None)
    if means is not values:
        axes.plot(steps, values, "-", color=line.get_color(), alpha=0.25, linewidth=0.9, zorder=1)
