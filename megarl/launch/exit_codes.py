"""Records how a job ended, in files that both the ranks and their launcher read. No torch.

    rank fails -> logs/failure_<rank>.json -+
                                            +-> first_failure -> one message on the terminal, exit.json
    rank killed -> exit status -------------+

Exit codes: 0 done, 1 a bug, 2 the config or input is wrong, 3 a check refused to continue, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megarl.platform.atomic import write_atomic
from megarl.platform.env import redact

DONE, DEFECT, USER, REFUSED, STOPPED = 0, 1, 2, 3, 130
PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
SAME_MOMENT_S = 2.0


@dataclass
class CurrentPhase:
    """The phase a rank is in: set as the run enters each phase, read when an exception ends the rank."""

    name: str = "start-up"


@dataclass(frozen=True, slots=True)
class Failure:
    rank: int  # -1: no particular rank
    code: int
    message: str  # one line
    phase: str = ""  # in which the failure happened
    traceback: str = ""  # the last lines; recorded for bugs only
    time_s: float = field(default_factory=time.time)  # since the epoch; the earliest failure is the cause

    def __post_init__(self) -> None:
        for name in ("message", "traceback"):
            object.__setattr__(self, name, redact(getattr(self, name)))


def classify(error: BaseException) -> int:
    """Returns the exit code for an exception that ends a rank.

    A ValueError or FileNotFoundError is the user's to correct only if megarl itself raised it: its message then gives
    the values and the remedy. Raised inside a library, the same exception is a bug.
    """
    if type(error).__name__ == "CheckFailed":  # megarl.types.CheckFailed, by name because its module imports torch
        return REFUSED
    if isinstance(error, ValueError | FileNotFoundError):
        frames = traceback.extract_tb(error.__traceback__)
        if frames and frames[-1].filename.startswith(PACKAGE):
            return USER
    return DEFECT


def record_failure(run_dir: Path, rank: int, error: BaseException, *, phase: str) -> Failure:
    """Write `error` to logs/failure_<rank>.json, where the launcher looks for it."""
    code = classify(error)
    text = " ".join(str(error).split()) or type(error).__name__
    message = text if code in (USER, REFUSED) else f"{type(error).__name__}: {text}"
    last_lines = "".join(traceback.format_exception(error)[-4:]) if code == DEFECT else ""
    failure = Failure(rank, code, message, phase, last_lines)
    file = run_dir / "logs" / f"failure_{rank}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(asdict(failure)))
    return failure


def first_failure(run_dir: Path) -> Failure | None:
    """Returns the earliest recorded failure; if simultaneous, a refused check comes before the bugs it may cause."""
    files = (run_dir / "logs").glob("failure_*.json")
    failures = sorted((Failure(**json.loads(file.read_text())) for file in files), key=lambda failure: failure.time_s)
    if failures and failures[-1].time_s - failures[0].time_s < SAME_MOMENT_S:
        failures.sort(key=lambda failure: failure.code == DEFECT)  # stable: by time within each
    return next(iter(failures), None)


def prepare_run_dir(run_dir: Path, config: str) -> None:
    """Write the resolved config, and remove the exit records of an earlier run of the same name."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    for file in (*(run_dir / "logs").glob("failure_*.json"), run_dir / "exit.json"):
        file.unlink(missing_ok=True)
    (run_dir / "config.yaml").write_text(config, encoding="utf-8")


def write_exit(run_dir: Path, code: int, failure: Failure | None = None, **facts: Any) -> None:
    """Write runs/<name>/exit.json: the exit code, which torchrun would turn into 1, and what failed."""
    values: dict[str, Any] = {"code": code, **facts}
    if failure is not None:
        values |= {"rank": failure.rank, "error": failure.message, "during": failure.phase}
    run_dir.mkdir(parents=True, exist_ok=True)
    write_atomic(run_dir / "exit.json", json.dumps(values))
