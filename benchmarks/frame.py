"""Times the contenders of a case in fresh processes, round by round, and compares their outputs.

Case --run_case--> contender.py (a process for each contender and round) --> [Result]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megarl.platform.env import child_env

__all__ = ["Case", "Contender", "Missing", "Outcome", "Result", "run_case"]

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Contender:
    label: str
    function: str  # "module:function"; function(**arguments) -> call
    # JSON values, added to those of the case
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """A comparison: the outputs and times of all contenders are compared with the first one's."""

    name: str
    contenders: tuple[Contender, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)  # JSON values
    threads: tuple[int, ...] = (1,)  # each gets a row
    rtol: float = 1e-5
    atol: float = 1e-6
    with_memory: bool = False
    # target: how many times as fast the first should be as each of the others
    at_least: float | None = None
    call_s: float = 1.0  # how long a process repeats the call


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call may return in place of an array."""

    output: np.ndarray | None = None
    seconds: float | None = None  # measured by the call itself
    figures: dict[str, float] = field(default_factory=dict)  # shown unchanged


class Missing(Exception):
    """Other software is not installed; the message is how to install it."""


@dataclass(frozen=True, slots=True)
class Result:
    """One contender of one case at one number of threads."""

    case: str
    contender: str
    threads: int
    seconds: float | None = None  # median over the processes; None if it did not run
    fastest_s: float | None = None
    slowest_s: float | None = None
    cpu_seconds: float | None = None  # CPU time: less affected than `seconds` by other load
    peak_bytes: int | None = None  # resident memory that the first call adds to its inputs
    figures: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    # why it did not run, or the largest difference from the first contender's output
    note: str = ""
    is_equal: bool = True
    # of the first contender over this one: seconds / the first's seconds
    speedup: float | None = None
    at_least: float | None = None


def run_case(
    case: Case, *, rounds: int, progress: Callable[[str], None] = lambda text: None
) -> list[Result]:
    """One result per contender and number of threads; the note of a contender that failed or is missing says why."""
    answers: dict[str, list[dict[str, Any]]] = {
        contender.label: [] for contender in case.contenders
    }
    notes: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder:
        outputs = {label: Path(folder) / f"{number}.npy" for number, label in enumerate(answers)}
        for round_ in range(rounds):
            for contender in case.contenders if round_ % 2 == 0 else case.contenders[::-1]:
                label = contender.label
                if label in notes:
                    continue
                progress(f"{case.name}: {label}, round {round_ + 1} of {rounds}")
                answer = _run_contender(case, contender, outputs[label] if round_ == 0 else None)
                if "error" in answer:
                    notes[label] = answer["error"]
                else:
                    answers[label].append(answer)
        compared = _compare(case, outputs)
    results = [
        _result(case, label, threads, answers[label], notes, compared)
        for threads in case.threads
        for label in answers
    ]
    return [_with_speedup(result, results) for result in results]


def _run_contender(case: Case, contender: Contender, output: Path | None) -> dict[str, Any]:
    """A fresh process reports {"seconds": {threads: median}, "peak_bytes", "figures", "versions"} or {"error": why}."""
    request = {
        "function": contender.function,
        "arguments": {**case.arguments, **contender.arguments},
        "threads": case.threads,
        "call_s": case.call_s,
        "output": None if output is None else str(output),
    }
    env = child_env(OMP_NUM_THREADS=max(case.threads), MKL_NUM_THREADS=max(case.threads))
    command = [sys.executable, "-m", "benchmarks.contender", json.dumps(request)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"timed out after {TIMEOUT_S:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    return {
        "error": f"failed: {(done.stderr.splitlines() or [f'exit code {done.returncode}'])[-1]}"
    }


def _compare(case: Case, outputs: Mapping[str, Path]) -> dict[str, tuple[bool, str]]:
    """For each contender but the first: whether its output equals the first's, and the largest difference."""
    first = next(iter(outputs))
    if not outputs[first].exists():
        return {}
    expected = np.load(outputs[first], mmap_mode="r")
    compared = {}
    for label, path in outputs.items():
        if label == first or not path.exists():
            continue
        theirs = np.load(path, mmap_mode="r")
        if theirs.shape != expected.shape:
            compared[label] = (False, f"output is {theirs.shape}, not {expected.shape}")
            continue
        off = np.abs(theirs.astype(np.float64) - expected)
        equal = bool(np.all(off <= case.atol + case.rtol * np.abs(expected)))
        compared[label] = (
            equal,
            f"{'equal' if equal else 'DIFFERS'}, at most {off.max(initial=0.0):.1e} apart",
        )
    return compared


def _result(
    case: Case,
    label: str,
    threads: int,
    answers: list[dict[str, Any]],
    notes: Mapping[str, str],
    compared: Mapping[str, tuple[bool, str]],
) -> Result:
    if label in notes:
        return Result(case.name, label, threads, note=notes[label])
    seconds = [answer["seconds"][str(threads)] for answer in answers]
    cpu_seconds = [
        s for answer in answers if (s := answer["cpu_seconds"][str(threads)]) is not None
    ]
    peaks = [answer["peak_bytes"] for answer in answers if answer["peak_bytes"] is not None]
    is_equal, note = compared.get(label, (True, ""))
    return Result(
        case.name,
        label,
        threads,
        seconds=median(seconds),
        fastest_s=min(seconds),
        slowest_s=max(seconds),
        cpu_seconds=median(cpu_seconds) if cpu_seconds else None,
        peak_bytes=int(median(peaks)) if case.with_memory and peaks else None,
        figures=answers[-1]["figures"],
        versions=answers[-1]["versions"],
        note=note,
        is_equal=is_equal,
        at_least=case.at_least,
    )


def _with_speedup(result: Result, results: list[Result]) -> Result:
    ours = next(other for other in results if other.threads == result.threads)
    if result is ours or result.seconds is None or not ours.seconds:
        return replace(result, at_least=None)
    return replace(result, speedup=result.seconds / ours.seconds)
