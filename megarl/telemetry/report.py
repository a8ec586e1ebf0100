"""Writes the report of a run and the comparison of several runs, without torch.

    metrics.jsonl, eval.jsonl, rollouts/step_*.jsonl, weights_plan.json
        --write_report--> report.png (curves), report.html (curves, samples, metrics, weight sync)
    several runs --write_comparison--> compare.html (a curve per run, the settings that differ)

Both pages use the template page.html. They load no external resources and run no scripts, because
sampled text is untrusted.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from megarl.config.load import flat, parse_yaml
from megarl.platform.env import escape_hidden
from megarl.processes.files import replacing, write_atomic
from megarl.telemetry.curves import (
    JsonRows,
    Panel,
    compared_panels,
    draw_png,
    line_styles,
    run_panels,
    svg,
    svg_element,
)
from megarl.telemetry.metrics import iterate_jsonl, read_metrics
from megarl.telemetry.plan_figure import draw_plan
from megarl.telemetry.sample_files import sample_files

PLAN = "weights_plan.json"  # in the run directory: the output of `megarl plan --weights --json`
NUM_SAMPLES = 4  # number of best samples, and of worst samples, that a report shows


def write_report(folder: Path) -> Path:
    """Writes report.png and report.html; returns the path of report.html.

    Raises FileNotFoundError if no step has finished.
    """
    rows, evaluations = _read(folder)
    panels = run_panels(rows, evaluations)
    last = rows[-1]
    summary = f"{len(rows)} steps"
    if "layout" in last:
        summary += f", layout {last['layout']}, world size {last.get('world_size')}"
    with replacing(folder / "report.png") as staging:
        draw_png(panels, f"{folder.name}: {summary}", staging)
    config = folder / "config.yaml"
    sections = {
        "summary": summary,
        "rows": rows,
        "evaluations": evaluations,
        "measured": _keys(evaluations),
        "samples": _samples(folder),
        "weight_sync": _weight_sync(folder),
        "peaks": [key for key in _keys(rows) if key.endswith("/peak_gb")],
    }
    if config.is_file():
        sections["config"] = config.read_text(encoding="utf-8", errors="replace")
    return _write_page(folder / "report.html", folder.name, panels, sections)


def write_comparison(folders: Sequence[Path]) -> Path:
    """Writes compare.html to the parent folder of the first run; returns its path.

    Raises ValueError for fewer than two runs or a repeated run, FileNotFoundError if a run has no
    finished step.
    """
    if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
        raise ValueError(
            f"--compare {' '.join(map(str, folders))}: pass at least two runs, each once"
        )
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = list(map(str, folders))
    runs = dict(zip(names, map(_read, folders), strict=True))
    return _write_page(
        folders[0].parent / "compare.html",
        " and ".join(names),
        compared_panels(runs),
        {"runs": runs, "styles": line_styles(runs), "differing": _differing_settings(folders)},
    )


def _read(folder: Path) -> tuple[JsonRows, JsonRows]:
    """Returns the rows of metrics.jsonl and of eval.jsonl.

    Raises FileNotFoundError if no step has finished.
    """
    rows = read_metrics(folder / "metrics.jsonl")
    if not rows:
        raise FileNotFoundError(
            f"{folder} has no finished step in metrics.jsonl; pass a run directory"
        )
    return rows, read_metrics(folder / "eval.jsonl")


def _keys(rows: JsonRows) -> Iterable[str]:
    """Returns the keys of all rows without repeats, in the order of their first occurrence."""
    return dict.fromkeys(chain.from_iterable(rows))


def _differing_settings(folders: Sequence[Path]) -> list[list[str]]:
    """Returns a row [dotted key, value in each config] for each setting that differs.

    Leaves out run.name and run.dir.
    """
    configs = [_settings(folder / "config.yaml") for folder in folders]
    rows = []
    for key in _keys(configs):
        values = [config.get(key, "-") for config in configs]
        if len(set(values)) > 1 and key not in ("run.name", "run.dir"):
            rows.append([key, *values])
    return rows


def _settings(file: Path) -> dict[str, str]:
    """Returns {dotted key: value} of the config in `file`; empty if the file is missing, or cannot
    be parsed (with a warning).
    """
    if not file.is_file():
        return {}
    try:
        return {
            key: value if isinstance(value, str) else json.dumps(value, default=str)
            for key, value in flat(parse_yaml(file.read_text(encoding="utf-8"), {"": ""}))
        }
    except (ValueError, AttributeError, yaml.YAMLError) as error:
        _warn_left_out(file, error)
        return {}


def _warn_left_out(file: Path, error: Exception) -> None:
    text = " ".join(str(error).split())[:200]
    print(
        f"megarl: warning: {file} cannot be read and is left out: {type(error).__name__} {text!r}",
        file=sys.stderr,
    )


def _samples(folder: Path) -> dict[str, JsonRows]:
    """Returns {heading: samples}: the best and the worst samples of the latest sample file."""
    files = sample_files(folder / "rollouts")
    if not files:
        return {}
    step, file = files.popitem()
    # samples of one prompt are often equal
    unique = {
        (sample["prompt"], sample["response"]): sample
        for sample in iterate_jsonl(file, prompt=str, response=str)
    }
    samples = sorted(unique.values(), key=_reward, reverse=True)
    middle = (len(samples) + 1) // 2
    return {
        f"Best samples of step {step}": samples[:middle][:NUM_SAMPLES],
        f"Worst samples of step {step}": samples[middle:][::-1][:NUM_SAMPLES],
    }


def _weight_sync(folder: Path) -> str:
    """Returns the figure of the weight sync as an <svg> element; "" if the run directory has no
    plan, or the plan cannot be drawn (with a warning).
    """
    plan = folder / PLAN
    if not plan.is_file():
        return ""
    try:
        return svg_element(draw_plan(json.loads(plan.read_text(encoding="utf-8"))))
    except Exception as error:  # noqa: BLE001 (an invalid file must not prevent the report)
        _warn_left_out(plan, error)
        return ""


def _reward(sample: Mapping[str, Any]) -> float:
    reward = sample.get("reward")
    return reward if isinstance(reward, int | float) else 0.0


def _shown(value: Any) -> str | int:
    """Formats a template value: escapes hidden characters in text; lists and objects become ""."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return escape_hidden(value)
    return value if isinstance(value, str | int) else ""


def _write_page(
    file: Path, title: str, panels: Sequence[Panel], sections: Mapping[str, Any]
) -> Path:
    """Renders page.html to `file`; `sections` are the template's variables. Returns `file`."""
    from jinja2 import Template

    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    text = Template(page, autoescape=True, finalize=_shown).render(
        sections, title=title, figures=map(svg, panels)
    )
    write_atomic(file, text.encode(errors="replace"))
    return file
