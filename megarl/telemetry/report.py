"""The report of a run, drawn without torch.

metrics.jsonl, eval.jsonl, rollouts/step_*.jsonl, weights_plan.json
    --write_report--> report.png (curves), report.html (curves, metrics, samples, weight sync; self-contained)
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.platform.atomic import replacing, write_atomic
from megarl.telemetry.metrics import read_metrics
from megarl.telemetry.plan_figure import draw_plan

PLAN = "weights_plan.json"  # in the run directory: the output of `megarl plan --weights --json`

Rows = Sequence[Mapping[str, Any]]

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN, PURPLE = "#2b6cb0", "#dd6b20", "#2f855a", "#805ad5"
# title, (metric, label, colour) of each curve, axis scale; panels without data are omitted
PANELS: tuple[tuple[str, tuple[tuple[str, str, str], ...], str], ...] = (
    ("entropy", (("entropy", "entropy", BLUE),), "linear"),
    ("gradient norm", (("grad_norm", "gradient norm", BLUE),), "linear"),
    (
        "log-prob difference, trainer and engine",
        (("logprob_diff/max", "max", ORANGE), ("logprob_diff/mean", "mean", BLUE)),
        "log",
    ),
    ("response length, tokens", (("length/mean", "mean", BLUE),), "linear"),
    ("loss", (("loss", "loss", BLUE),), "linear"),
    ("sampled tokens per second", (("tokens_per_second", "tokens/s", BLUE),), "linear"),
)
HEADLINE = (
    ("reward/accuracy/mean", "accuracy, sampled", BLUE),
    ("accuracy/sampled", "accuracy, sampled", BLUE),
    ("reward/mean", "reward", ORANGE),
)
HELD_OUT = (  # of eval.jsonl
    ("accuracy", "accuracy, held-out problems", GREEN),
    ("sampled_accuracy", "sampled accuracy, held-out problems", PURPLE),
)


def write_report(folder: Path) -> Path:
    """Writes report.png and report.html of the run in `folder`; returns the path of report.html.

    Raises FileNotFoundError if no step has finished.
    """
    rows = read_metrics(folder / "metrics.jsonl")
    if not rows:
        raise FileNotFoundError(f"{folder} has no finished step in metrics.jsonl; pass a run directory")
    evaluations = read_metrics(folder / "eval.jsonl")
    with replacing(folder / "report.png") as staging:
        draw(rows, evaluations, folder.name, staging)
    write_atomic(folder / "report.html", _page(folder, rows, evaluations, (folder / "report.png").read_bytes()))
    return folder / "report.html"


def draw(rows: Rows, evaluations: Rows, name: str, file: Path) -> None:
    """Draws a wide panel of reward and accuracy, and a small one for each of PANELS."""
    from matplotlib.figure import Figure

    panels = [panel for panel in PANELS if any(_series(rows, key)[0] for key, _, _ in panel[1])]
    lines = (len(panels) + 2) // 3
    figure = Figure(figsize=(11, 3.6 + 2.1 * lines), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(1 + lines, 3, height_ratios=[1.7] + [1] * lines)
    headline = [curve for curve in HEADLINE if _series(rows, curve[0])[0]]
    top = figure.add_subplot(grid[0, :])
    _panel(top, rows, "reward and accuracy", headline or (("loss", "loss", BLUE),), "linear")
    for key, label, colour in HELD_OUT:
        steps, values = _series(evaluations, key)
        if values:
            top.plot(steps, values, "D:", color=colour, linewidth=0.9, markersize=5, label=label)
    if headline:
        top.legend(frameon=False, fontsize=9, labelcolor=INK, loc="best")
        _label_ends(top, rows, headline)
    for index, (title, curves, scale) in enumerate(panels):
        axes = figure.add_subplot(grid[1 + index // 3, index % 3])
        _panel(axes, rows, title, curves, scale)
        if len(curves) > 1:
            axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="best")
    last = rows[-1]
    layout = f", layout {last['layout']} on {last['world_size']} processes" if "layout" in last else ""
    figure.suptitle(f"{name}: {len(rows)} steps{layout}", color=INK, fontsize=13, x=0.01, ha="left")
    figure.supxlabel("step", color=FAINT, fontsize=9)
    figure.savefig(file, dpi=130, format="png")


def _series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    points = [(int(row["step"]), float(row[key])) for row in rows if isinstance(row.get(key), int | float)]
    return [step for step, _ in points], [value for _, value in points]


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred running mean, shorter at the ends."""
    half = window // 2
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - half) : i + half + 1])]


def _panel(axes: Any, rows: Rows, title: str, curves: Sequence[tuple[str, str, str]], scale: str) -> None:
    for key, label, colour in curves:
        steps, values = _series(rows, key)
        if scale == "log":
            steps, values = [s for s, v in zip(steps, values, strict=True) if v > 0], [v for v in values if v > 0]
        marker = "o" if len(values) < 12 else None
        if len(values) >= 24:  # a running mean in front of the values
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.9)
            values = _smooth(values, max(5, len(values) // 15))
        axes.plot(steps, values, color=colour, linewidth=1.7, label=label, marker=marker, markersize=3.5)
    axes.set_title(title, fontsize=9.5, color=INK, loc="left")
    if scale == "log" and any(line.get_ydata().size for line in axes.lines):
        axes.set_yscale("log")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=FAINT, labelsize=8, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)


def _label_ends(axes: Any, rows: Rows, curves: Sequence[tuple[str, str, str]]) -> None:
    """Annotates the first curve with its first and last value."""
    key, _, colour = curves[0]
    steps, values = _series(rows, key)
    if len(values) < 2:
        return
    few = max(1, len(values) // 20)
    style = {"va": "top", "fontsize": 9, "color": colour, "weight": "bold"}
    for step, ends, side in ((steps[0], values[:few], "left"), (steps[-1], values[-few:], "right")):
        mean = sum(ends) / few
        axes.annotate(f"{mean:.2f}", (step, mean), textcoords="offset points", xytext=(0, -7), ha=side, **style)


STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1f2933;max-width:1000px;margin:2em auto;padding:0 1em}
img{width:100%} h2{font-size:1.1em;margin-top:2em} table{border-collapse:collapse;font-size:13px;width:100%}
td,th{border-bottom:1px solid #e4e7eb;padding:.35em .8em .35em 0;text-align:left;vertical-align:top}
pre{margin:0;white-space:pre-wrap;word-break:break-word;font-size:12px}
.num{font-variant-numeric:tabular-nums}
"""


def _page(folder: Path, rows: Rows, evaluations: Rows, picture: bytes) -> str:
    """A self-contained HTML document."""
    image = base64.b64encode(picture).decode()
    parts = [
        f"<!doctype html><meta charset=utf-8><title>{html.escape(folder.name)}</title><style>{STYLE}</style>",
        f"<h1>{html.escape(folder.name)}</h1><img alt='curves' src='data:image/png;base64,{image}'>",
    ]
    if evaluations:
        cells = [[_format(value) for value in row.values()] for row in evaluations]
        parts += ["<h2>Held-out problems</h2>", _table(list(evaluations[0]), cells)]
    ends = [(key, _format(rows[0].get(key)), _format(value)) for key, value in rows[-1].items()]
    parts += [*_sample_tables(folder), *_weights(folder)]
    parts += ["<h2>First and last step</h2>", _table(("metric", "first", "last"), ends, "num")]
    if (config := folder / "config.yaml").is_file():
        parts.append(f"<h2>Config</h2><pre>{html.escape(config.read_text(encoding='utf-8'))}</pre>")
    return "\n".join(parts) + "\n"


def _weights(folder: Path) -> list[str]:
    """The figure of the weight sync, if the launcher has written its plan."""
    if not (folder / PLAN).is_file():
        return []
    picture = folder / "weights_plan.svg"
    draw_plan(json.loads((folder / PLAN).read_text(encoding="utf-8")), picture)
    image = base64.b64encode(picture.read_bytes()).decode()
    return ["<h2>Weight sync</h2>", f"<img alt='flows' src='data:image/svg+xml;base64,{image}'>"]


def _sample_tables(folder: Path, count: int = 6) -> list[str]:
    """Samples of the first and the last step."""
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    tables = []
    for file in dict.fromkeys([*files[:1], *files[-1:]]):
        lines = file.read_text(encoding="utf-8").splitlines()
        samples = [json.loads(line) for line in lines[:: max(1, len(lines) // count)][:count]]
        body = [(s["prompt"], s["response"], s.get("answer") or "", _format(s["reward"])) for s in samples]
        title = f"<h2>Samples of {file.stem.replace('_', ' ')}</h2>"
        tables += [title, _table(("prompt", "response", "answer", "reward"), body)]
    return tables


def _table(head: Sequence[str], body: Sequence[Sequence[str]], kind: str = "") -> str:
    def cells(row: Sequence[str]) -> str:
        first, *rest = (f"<pre>{html.escape(text)}</pre>" for text in row)
        return f"<tr><td>{first}</td>" + "".join(f"<td class='{kind}'>{cell}</td>" for cell in rest) + "</tr>"

    heads = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    return f"<table><tr>{heads}</tr>{''.join(map(cells, body))}</table>"


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
