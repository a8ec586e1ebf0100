"""The command: names to cases, cases to results, results to a table and a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.frame import Result, run_case
from benchmarks.names import BENCHES, cases
from benchmarks.table import machine, show, show_run, write_json

__all__ = ["bench", "describe"]


def describe() -> str:
    """One line a bench."""
    return "\n".join(f"{name:12} {bench.about}" for name, bench in BENCHES.items())


def bench(names: Sequence[str], *, only: str = "", rounds: int = 3, json_file: Path | None = None) -> bool:
    """Run all cases of the named benches; False where a contender's output was not ours, or ours failed.

    Raises ValueError for a name that does not exist, for `only` that no case holds, and for less than one round.
    """
    if rounds < 1:
        raise ValueError(f"--rounds={rounds}; at least 1")
    chosen = [case for name in names for case in cases(name) if only in case.name]
    if not chosen:
        raise ValueError(f"no case of {', '.join(names)} holds --only={only!r}")
    run: dict[str, Any] = {"rounds": rounds, "before": machine()}
    results: list[Result] = []
    for case in chosen:
        found = run_case(case, rounds=rounds, say=lambda text: print(text, file=sys.stderr))
        run["after"] = machine()
        results += found
        show(found)
        if json_file is not None:  # after every case: whoever stops a long bench keeps what it has found
            write_json(json_file, results, run)
    show_run(results, run)
    failed = any(result.seconds is None and result.contender == "megarl" for result in results)
    return not failed and all(result.is_equal for result in results)
