"""Run the cases of the named benchmarks; print a table and write a file."""

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
    """One line per benchmark."""
    lines = [f"{name:12} {bench.about}" for name, bench in BENCHES.items()]
    lines.append(
        "plans        weight syncs of large models against their physical floor (run it alone)"
    )
    lines.append(
        "algorithms   ppo to dr_grpo at equal sampled tokens, --rounds seeds each (run it alone)"
    )
    lines.append("ranks512     what 512 ranks exchange, plan and reduce each step (run it alone)")
    return "\n".join(
        [
            *lines,
            "code_reward  samples a second of the code reward: python -m benchmarks.code_reward",
        ]
    )


def bench(
    names: Sequence[str], *, only: str = "", rounds: int = 3, json_file: Path | None = None
) -> bool:
    """Run all cases of the named benchmarks whose name contains `only`.

    Returns False if a contender's output differs from megarl's, or megarl failed. Raises ValueError for an unknown
    name, for an `only` that matches no case, and for less than one round.
    """
    if rounds < 1:
        raise ValueError(f"--rounds={rounds}; at least 1")
    chosen = [case for name in names for case in cases(name) if only in case.name]
    if not chosen:
        raise ValueError(f"no case of {', '.join(names)} contains --only={only!r}")
    run: dict[str, Any] = {"rounds": rounds, "before": machine()}
    results: list[Result] = []
    for case in chosen:
        case_results = run_case(
            case, rounds=rounds, progress=lambda text: print(text, file=sys.stderr)
        )
        run["after"] = machine()
        results += case_results
        show(case_results)
        if (
            json_file is not None
        ):  # after every case: a long benchmark that is stopped keeps its results
            write_json(json_file, results, run)
    show_run(results, run)
    failed = any(result.seconds is None and result.contender == "megarl" for result in results)
    return not failed and all(result.is_equal for result in results)
