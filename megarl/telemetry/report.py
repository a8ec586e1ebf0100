"""Writes the report of a run and the comparison of several runs, without torch.

    metrics.jsonl, eval.jsonl, rollouts/step_*.jsonl, weights_plan.json
        --write_report--> report.png (curves), report.html (curves, samples, metrics, weight sync)
    several runs --write_comparison--> compare.html (a curve per run, the settings that differ)

Both pages use the template page.html. They load no external resources and run no scripts, because
sampled text is untrusted.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from megarl.config.load import flat, parse_yaml
from megarl.platform.env import escape_hidden
from megarl.processes.exit_codes import say
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
from megarl.telemetry.metrics import NamedValues, iterate_jsonl, read_metrics
from megarl.telemetry.plan_figure import draw_plan
from megarl.telemetry.sample_files import sample_files

PLAN = "weights_plan.json"  # in the run directory: the output of `megarl plan --weights --json`
# limits of a page, in rows read of a file, rows of the table of evaluations, groups of samples,
# samples of a group, characters of a text, and bytes
MAX_ROWS = 5_000
MAX_EVALUATIONS = 100
MAX_GROUPS = 6
MAX_SAMPLES = 8
MAX_CHARS = 20_000
MAX_BYTES = 20_000_000
LARGE = ("samples", "config", "evaluations", "rows", "differing", "weight_sync", "figures")


def write_report(folder: Path) -> Path:
    """Writes report.png and report.html; returns the path of report.html.

    Raises FileNotFoundError if no step has finished.
    """
    rows, evaluations = _read(folder)
    panels = run_panels(rows, evaluations)
    last = rows[-1]
    summary = f"{last['step'] + 1} steps"
    if len(rows) <= last["step"]:
        summary += f", {len(rows)} of them drawn"
    if "layout" in last:
        summary += f", layout {last['layout']}, world size {last.get('world_size')}"
    with replacing(folder / "report.png") as staging:
        draw_png(panels, f"{folder.name}: {summary}", staging)
    config = folder / "config.yaml"
    files = sample_files(folder / "rollouts")
    sampled = max(files, default=0)
    sections = {
        "summary": summary,
        "rows": rows,
        "evaluations": evaluations[-MAX_EVALUATIONS:],
        "measured": _keys(evaluations),
        "samples": _samples(files.get(sampled, folder)),
        "most": MAX_SAMPLES,
        "sampled": sampled,
        "weight_sync": _weight_sync(folder),
        "recorded": _keys(rows),
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
    rows = read_metrics(folder / "metrics.jsonl", MAX_ROWS)
    if not rows:
        raise FileNotFoundError(
            f"{folder} has no finished step in metrics.jsonl; pass a run directory"
        )
    return rows, read_metrics(folder / "eval.jsonl", MAX_ROWS)


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
    say(f"warning: {file} cannot be read and is left out: {type(error).__name__} {text!r}")


def _samples(file: Path) -> list[tuple[str, JsonRows]]:
    """Returns the samples of a sample file by reward, or by range of rewards, the best first. Empty
    if `file` is not a file.
    """
    samples = sorted(iterate_jsonl(file, prompt=str, response=str), key=_reward, reverse=True)
    least = 1  # samples of a group
    if len(set(map(_reward, samples))) > MAX_GROUPS:
        least = -(-len(samples) // MAX_GROUPS)
    groups: list[list[Any]] = []
    for sample in samples:
        if not groups or (len(groups[-1]) >= least and _reward(sample) != _reward(groups[-1][-1])):
            groups.append([])
        groups[-1].append(sample)
    return [(_range(group), group) for group in groups]


def _range(samples: JsonRows) -> str:
    """Returns the rewards of samples that are sorted, the best first: "0.5" or "0.25 to 0.5"."""
    ends = (samples[-1], samples[0])
    return " to ".join(dict.fromkeys(f"{_reward(sample):.4g}" for sample in ends))


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


def _reward(sample: NamedValues) -> float:
    reward = sample.get("reward")
    return reward if isinstance(reward, int | float) else 0.0


def _shown(value: Any) -> str | int:
    """Formats a template value: escapes hidden characters in text, and leaves out the middle of a
    long one; lists and objects become "".
    """
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str) and not hasattr(value, "__html__"):
        left_out = len(value) - MAX_CHARS
        if left_out > 0:
            half = MAX_CHARS // 2
            value = f"{value[:half]}\n[{left_out} characters are left out]\n{value[-half:]}"
        return escape_hidden(value)
    return value if isinstance(value, str | int) else ""


def _write_page(file: Path, title: str, panels: Sequence[Panel], sections: NamedValues) -> Path:
    """Renders page.html to `file`; `sections` are the template's variables. Returns `file`.

    A page of more than MAX_BYTES is written without its LARGE sections, as many as needed.
    """
    from jinja2 import Template

    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    template = Template(page, autoescape=True, finalize=_shown)
    left_out = []
    values = {
        **sections,
        "title": title,
        "figures": [svg(panel) for panel in panels],
        "left_out": left_out,
    }
    text = template.render(values).encode(errors="replace")
    for section in LARGE:
        if len(text) > MAX_BYTES:
            left_out.append(section)
            values.pop(section, None)
            text = template.render(values).encode(errors="replace")
    write_atomic(file, text)
    return file
