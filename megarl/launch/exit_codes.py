"""How a job ended, as files both the ranks and their launcher understand. No torch.

    rank fails -> logs/failure_<rank>.json -+
                                            +-> first_failure -> one message on the terminal, exit.json
    rank killed -> exit status -------------+

Exit codes: 0 done, 2 the config or input is wrong, 3 a check refused to go on, 1 a defect of ours, 130 stopped.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "DEFECT",
    "DONE",
    "REFUSED",
    "STOPPED",
    "USER",
    "Failure",
    "classify",
    "first_failure",
    "record_failure",
    "write_exit",
]

DONE, DEFECT, USER, REFUSED, STOPPED = 0, 1, 2, 3, 130
PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


@dataclass(frozen=True, slots=True)
class Failure:
    rank: int
    code: int
    message: str  # one line
    during: str  # the phase it happened in
    at: float  # seconds since the epoch: the first failure is the cause, later ones are its echo
    tail: str = ""  # last lines of the traceback, for defects


def classify(error: BaseException) -> int:
    """The exit code of an exception that left the loop.

    A ValueError or missing file is the user's to mend when megarl itself raised it, as its text then has the
    values and the remedy; the same class raised inside a library is a defect.
    """
    if isinstance(error, KeyboardInterrupt):
        return STOPPED
    if type(error).__name__ == "CheckFailed":  # megarl.types.CheckFailed, not imported: it would bring torch
        return REFUSED
    if isinstance(error, ValueError | FileNotFoundError):
        frames = traceback.extract_tb(error.__traceback__)
        if frames and frames[-1].filename.startswith(PACKAGE):
            return USER
    return DEFECT


def record_failure(run_dir: Path, rank: int, error: BaseException, *, during: str) -> Failure:
    """Write what ended `rank` for the launcher to show."""
    code = classify(error)
    text = " ".join(str(error).split()) or type(error).__name__
    message = text if code in (USER, REFUSED) else f"{type(error).__name__}: {text}"
    tail = "".join(traceback.format_exception(error)[-4:]) if code == DEFECT else ""
    failure = Failure(rank, code, message, during, time.time(), tail)
    _write_atomic(run_dir / "logs" / f"failure_{rank}.json", asdict(failure))
    return failure


def first_failure(run_dir: Path) -> Failure | None:
    """The earliest recorded failure; a refused check outranks an error it caused elsewhere in the same moment."""
    found = []
    for file in (run_dir / "logs").glob("failure_*.json"):
        found.append(Failure(**json.loads(file.read_text())))
    return min(found, key=lambda f: (f.code == DEFECT, f.at) if _together(found) else (False, f.at), default=None)


def _together(failures: list[Failure]) -> bool:
    times = [failure.at for failure in failures]
    return max(times) - min(times) < 2.0


def clear_failures(run_dir: Path) -> None:
    """Forget how an earlier run of this name ended."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    for file in (run_dir / "logs").glob("failure_*.json"):
        file.unlink(missing_ok=True)
    (run_dir / "exit.json").unlink(missing_ok=True)


def write_exit(run_dir: Path, code: int, failure: Failure | None = None, **facts: Any) -> None:
    """runs/<name>/exit.json: the true exit code, also where torchrun turns every failure into 1."""
    values: dict[str, Any] = {"code": code, **facts}
    if failure is not None:
        values |= {"rank": failure.rank, "error": failure.message, "during": failure.during}
    _write_atomic(run_dir / "exit.json", values)


def _write_atomic(file: Path, values: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    staging = file.with_name(f".{file.name}.{os.getpid()}")
    staging.write_text(json.dumps(values), encoding="utf-8")
    os.replace(staging, file)
