"""Results as a table on the terminal, and as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.frame import Result
from megarl.platform.env import is_interactive

__all__ = ["machine", "show", "show_run", "write_json"]


def machine() -> dict[str, Any]:
    """The machine and its load averages over 1, 5 and 15 minutes."""
    return {
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def show(results: Sequence[Result]) -> None:
    """Print the table of one case."""
    columns = (
        "threads",
        "contender",
        "median ms",
        "fastest - slowest",
        "CPU ms",
        "over megarl",
        "peak MiB",
        "output",
    )
    table = Table(*columns, title=results[0].case, title_justify="left")
    for result in results:
        table.add_row(*_cells(result))
    _console().print(table)


def show_run(results: Sequence[Result], run: dict[str, Any]) -> None:
    """Print rounds, machine and versions; `run` has `rounds`, and the machine `before` and `after`."""
    before, after = run["before"], run["after"]
    versions: dict[str, str] = {}
    for result in results:
        versions |= result.versions
    for line in (
        f"Medians of {run['rounds']} fresh processes per contender.",
        f"{before['cpus']} x {before['cpu']}, load {before['load'][0]} before and {after['load'][0]} after.",
        ", ".join(f"{name} {number}" for name, number in versions.items()),
    ):
        _console().print(line, highlight=False)


def _console() -> Console:
    return Console(width=None if is_interactive() else 160)


def _cells(result: Result) -> tuple[str, ...]:
    if result.seconds is None or result.fastest_s is None or result.slowest_s is None:
        return (str(result.threads), result.contender, *"-----", result.note)
    over = "" if result.speedup is None else f"{result.speedup:.2f}x"
    if result.speedup is not None and result.at_least is not None:
        over += f" ({'>=' if result.speedup >= result.at_least else 'BELOW'} {result.at_least:g}x)"
    figures = [f"{name} {value:.4g}" for name, value in result.figures.items()]
    return (
        str(result.threads),
        result.contender,
        f"{result.seconds * 1e3:.2f}",
        f"{result.fastest_s * 1e3:.2f} - {result.slowest_s * 1e3:.2f}",
        "" if result.cpu_seconds is None else f"{result.cpu_seconds * 1e3:.2f}",
        over,
        "" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:.0f}",
        ", ".join([result.note, *figures] if result.note else figures),
    )


def write_json(path: Path, results: Sequence[Result], run: dict[str, Any]) -> None:
    report = {**run, "results": [asdict(result) for result in results]}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
