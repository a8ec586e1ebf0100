"""The report of a run, and the comparison of several, drawn without torch.

    metrics.jsonl, eval.jsonl, rollouts/step_*.jsonl, weights_plan.json
        --write_report--> report.png (curves), report.html (curves, samples, metrics, weight sync)
    several runs --write_comparison--> compare.html (a curve per run, the settings that differ)

Pages refer to nothing outside of themselves, and run no script: sampled text is untrusted.
"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megarl.config.load import flat
from megarl.platform.atomic import replacing, write_atomic
from megarl.telemetry.curves import (
    COLOURS,
    Panel,
    Rows,
    compared_panels,
    draw_png,
    run_panels,
    run_styles,
    svg,
    themed,
)
from megarl.telemetry.metrics import read_jsonl, read_metrics
from megarl.telemetry.plan_figure import draw_plan
from megarl.telemetry.sample_files import sample_files

PLAN = "weights_plan.json"  # in the run directory: the output of `megarl plan --weights --json`
NUM_SAMPLES = 4  # shown, of the best and of the worst


def write_report(folder: Path) -> Path:
    """Writes report.png and report.html, whose path it returns. Raises FileNotFoundError if no step has finished."""
    rows, evaluations = _read(folder)
    panels, last = run_panels(rows, evaluations), rows[-1]
    layout = (
        f", layout {last['layout']}, world size {last.get('world_size')}"
        if "layout" in last
        else ""
    )
    with replacing(folder / "report.png") as staging:
        draw_png(panels, f"{folder.name}: {len(rows)} steps{layout}", staging)
    parts = [f"<p>{html.escape(f'{len(rows)} steps{layout}')}</p>", *_figures(panels)]
    if evaluations:
        parts += ["<h2>Held-out problems</h2>", _held_out(evaluations)]
    parts += [*_sample_sections(folder), *_weights(folder)]
    peaks = {key.split("/")[1]: key for row in rows for key in row if key.endswith("/peak_gb")}
    if peaks:
        most = [
            (phase, max(_number(row.get(key)) or 0.0 for row in rows))
            for phase, key in peaks.items()
        ]
        parts += ["<h2>Peak memory</h2>", _table(("phase", "GB"), most)]
    ends = [(key, rows[0].get(key), value) for key, value in last.items()]
    parts.append(_folded("First and last step", _table(("metric", "first", "last"), ends)))
    if (config := folder / "config.yaml").is_file():
        text = config.read_text(encoding="utf-8", errors="replace")
        parts.append(_folded("Config", f"<pre>{html.escape(text)}</pre>"))
    return _write_page(folder / "report.html", folder.name, parts)


def write_comparison(folders: Sequence[Path]) -> Path:
    """Writes compare.html beside the first run; returns its path. Raises ValueError for fewer than two runs,
    FileNotFoundError if no step of a run has finished."""
    if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
        raise ValueError(
            f"--compare {' '.join(map(str, folders))}: pass at least two runs, each once"
        )
    is_unique = len({folder.name for folder in folders}) == len(folders)
    named = {folder.name if is_unique else str(folder): folder for folder in folders}
    runs = {name: _read(folder) for name, folder in named.items()}
    keys = [
        f"<li><i class='{'dashed' if is_dashed else 'solid'}' style='border-color:var(--{colour})'></i>"
        f"{html.escape(name)} <small>{len(rows)} steps</small></li>"
        for (name, (rows, _)), (colour, is_dashed) in zip(
            runs.items(), run_styles(len(runs)), strict=True
        )
    ]
    differing = _differing_settings([folder / "config.yaml" for folder in folders])
    parts = [f"<ul class=legend>{''.join(keys)}</ul>", *_figures(compared_panels(runs))]
    parts += ["<h2>Settings that differ</h2>", _table(("setting", *named), differing)]
    return _write_page(folders[0].parent / "compare.html", " and ".join(named), parts)


def _read(folder: Path) -> tuple[Rows, Rows]:
    """Lines of metrics.jsonl and eval.jsonl."""
    rows = read_metrics(folder / "metrics.jsonl")
    if not rows:
        raise FileNotFoundError(
            f"{folder} has no finished step in metrics.jsonl; pass a run directory"
        )
    return rows, read_metrics(folder / "eval.jsonl")


def _held_out(evaluations: Rows) -> str:
    """A column for each figure, with its interval."""
    keys = dict.fromkeys(
        key for row in evaluations for key in row if not key.endswith(("/low", "/high"))
    )

    def cell(row: Mapping[str, Any], key: str) -> str:
        ends = [_format(row[f"{key}/{end}"]) for end in ("low", "high") if f"{key}/{end}" in row]
        return _format(row.get(key)) + (f" ({' .. '.join(ends)})" if ends else "")

    return _table(list(keys), [[cell(row, key) for key in keys] for row in evaluations])


def _differing_settings(files: Sequence[Path]) -> list[list[str]]:
    """Rows of a dotted key and its value in each config; run.name and run.dir always differ and are left out."""
    configs = [_settings(file) if file.is_file() else {} for file in files]
    keys = dict.fromkeys(
        key for config in configs for key in config if key not in ("run.name", "run.dir")
    )
    rows = [[key, *(config.get(key, "-") for config in configs)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _settings(file: Path) -> dict[str, str]:
    """The config in `file`, or none if it cannot be read; one that a run wrote has no aliases."""
    try:
        text = file.read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("it has aliases")
        values = flat(yaml.safe_load(text))
        return {
            key: value if isinstance(value, str) else json.dumps(value, default=str)
            for key, value in values
        }
    except (ValueError, AttributeError, RecursionError, yaml.YAMLError) as error:
        _warn_left_out(file, error)
        return {}


def _warn_left_out(file: Path, error: Exception) -> None:
    text = " ".join(str(error).split())[:200]
    print(
        f"megarl: warning: {file} cannot be read and is left out: {type(error).__name__} {text!r}",
        file=sys.stderr,
    )


def _sample_sections(folder: Path) -> list[str]:
    """The best and the worst samples of the last file."""
    files = sample_files(folder / "rollouts")
    if not files:
        return []
    step, file = files.popitem()
    rows = read_jsonl(file, prompt=str, response=str)
    unique = {
        (sample["prompt"], sample["response"]): sample for sample in rows
    }  # a prompt's are often equal
    samples = sorted(
        unique.values(), key=lambda sample: _number(sample.get("reward")) or 0.0, reverse=True
    )
    middle = (len(samples) + 1) // 2
    best, worst = samples[:middle][:NUM_SAMPLES], samples[middle:][-NUM_SAMPLES:]
    return [
        f"<h2>{title} samples of step {step}</h2><div class=samples>{''.join(map(_sample, part))}</div>"
        for title, part in (("Best", best), ("Worst", worst[::-1]))
        if part
    ]


def _sample(values: Mapping[str, Any]) -> str:
    rewards = values.get("rewards")
    facts = (
        [f"{name} {_format(x)}" for name, x in rewards.items()] if isinstance(rewards, dict) else []
    )
    if (advantage := _number(values.get("advantage"))) is not None:
        facts.append(f"advantage {advantage:+.3g}")
    facts += [f"{_format(values['length'])} tokens"] if "length" in values else []
    facts.append("truncated" if values.get("truncated") else _format(values.get("finish")))
    answer = (
        ""
        if values.get("answer") is None
        else f"<small>answer: {html.escape(_format(values['answer']))}</small>"
    )
    return (
        f"<article><p><b>reward {html.escape(_format(values.get('reward')))}</b> "
        f"<small>{html.escape(' · '.join(facts))}</small></p>"
        f"<pre class=prompt>{html.escape(values['prompt'])}</pre>"
        f"<pre>{html.escape(values['response'])}</pre>{answer}</article>"
    )


def _weights(folder: Path) -> list[str]:
    """The figure of the weight sync, if the launcher has written its plan."""
    if not (folder / PLAN).is_file():
        return []
    picture = folder / "weights_plan.svg"
    try:
        draw_plan(json.loads((folder / PLAN).read_text(encoding="utf-8")), picture)
    except Exception as error:  # noqa: BLE001 (whatever the file holds, the other parts are drawn)
        _warn_left_out(folder / PLAN, error)
        return []
    return [
        "<h2>Weight sync</h2>",
        f"<figure>{themed(picture.read_text(encoding='utf-8'))}</figure>",
    ]


def _figures(panels: Sequence[Panel]) -> list[str]:
    return ["<div class=panels>", *(f"<figure>{svg(panel)}</figure>" for panel in panels), "</div>"]


def _table(head: Sequence[str], body: Sequence[Sequence[Any]]) -> str:
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(_format(x))}</td>' for x in row)}</tr>" for row in body
    )
    return f"<div class=wide><table><tr>{heads}</tr>{rows}</table></div>"


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>"


def _format(value: Any) -> str:
    return (
        f"{value:.4g}"
        if isinstance(value, float)
        else str(value)
        if isinstance(value, str | int)
        else ""
    )


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:1080px;margin:0 auto;
 padding:1.2em}
h1{font-size:1.5em;margin:0;overflow-wrap:anywhere} h2{font-size:1.1em;margin:2em 0 .6em} p{margin:.3em 0}
small,summary,.prompt{color:var(--faint)} small{font-size:12px}
.panels,.samples{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:1em}
figure{margin:0} svg{width:100%;height:auto;display:block}
article{border:1px solid var(--grid);border-radius:6px;padding:.7em .9em;min-width:0}
pre{margin:.3em 0;white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px;max-height:20em;overflow-y:auto}
details{margin-top:2em} details pre{max-height:none} summary{cursor:pointer;font-weight:600}
.wide{overflow-x:auto} table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
td,th{border-bottom:1px solid var(--grid);padding:.3em 1.2em .3em 0;text-align:left;vertical-align:top}
td+td{overflow-wrap:anywhere;min-width:5em}
.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.3em 1.5em}
.legend i{display:inline-block;width:1.6em;margin-right:.5em;vertical-align:middle;border-top:3px solid}
.legend .dashed{border-top-style:dashed}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # nothing is loaded, and no script runs


def _write_page(file: Path, title: str, parts: Sequence[str]) -> Path:
    light, dark = (
        "".join(f"--{name}:{colours[theme]};" for name, colours in COLOURS.items())
        for theme in range(2)
    )
    head = (
        '<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><meta name="color-scheme" content="light dark">'
        f"<title>{html.escape(title)}</title><style>:root{{{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{STYLE}</style><h1>{html.escape(title)}</h1>"
    )
    write_atomic(file, "\n".join([head, *parts, ""]).encode("utf-8", errors="replace"))
    return file
