"""Records how a job ended, and defines the exit codes. Does not import torch.

rank fails -> its slot (processes.heartbeat) -+
                                           +-> first_failure -> one message, exit.json
rank killed -> exit status ----------------+
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

from megarl.platform.env import log_text
from megarl.processes.files import full_disk, write_atomic

# exit codes of every command; the text below each is its entry in the documentation
DONE = 0
"""Done."""
DEFECT = 1
"""A bug in megarl, with a traceback. Please report it."""
USER = 2
"""The config or the input is wrong. One line names the setting, its value and the remedy."""
REFUSED = 3
"""A check refused to continue, every update of a run was skipped, a rank was stopped or stuck, an
engine or a node was lost, or the disk is full. Everything up to the last complete step is saved."""
STOPPED = 130
"""Interrupted with Ctrl-C."""
TERMINATED = 143
"""Stopped by SIGTERM. The last complete step is saved, and the same command resumes after it."""
PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
# exceptions of megarl.types, which imports torch, and of split.ray_cluster: name -> exit code
NAMED = {"CheckFailed": REFUSED, "Terminated": TERMINATED, "NodeGone": REFUSED}
SAVED = "stopped by SIGTERM; the last complete step is saved, and the same command resumes after it"
SAME_MOMENT_S = 2.0


@dataclass
class CurrentPhase:
    """The phase that a rank is in. The run updates it; the rank's heartbeat and the handler of an
    exception that ends the rank read it.
    """

    name: str = "start-up"
    engine_steps: int = 0
    is_stopping: bool = False  # SIGTERM has arrived


@dataclass(frozen=True)
class Failure:
    rank: int  # -1: no particular rank
    code: int
    message: str  # one line
    phase: str = ""  # the rank's phase at the time
    traceback: str = ""  # the last lines; recorded for bugs only
    # seconds since the epoch; the earliest failure is the cause
    time_s: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        for name in ("message", "traceback"):
            object.__setattr__(self, name, log_text(getattr(self, name)))


def classify(error: BaseException) -> int:
    """Returns the exit code for an exception that ends a rank.

    A ValueError or FileNotFoundError is a user error if megarl itself raised it, with the values
    and the remedy. If a library raised it, it is a bug.
    """
    if (name := type(error).__name__) in NAMED:
        return NAMED[name]
    if isinstance(error, ValueError | FileNotFoundError):
        frames = traceback.extract_tb(error.__traceback__)
        if frames and frames[-1].filename.startswith(PACKAGE):
            return USER
    return DEFECT


def failure_of(error: BaseException, rank: int, *, phase: str, run_dir: Path) -> Failure:
    code = classify(error)
    kind = type(error).__name__
    text = SAVED if code == TERMINATED else " ".join(str(error).split()) or kind
    if code != DEFECT:
        return Failure(rank, code, text, phase)
    full = full_disk(error, run_dir)
    if full:
        return Failure(rank, REFUSED, full, phase)
    last_lines = "".join(traceback.format_exception(error)[-4:])
    return Failure(rank, code, f"{kind}: {text}", phase, last_lines)


def to_record(failure: Failure) -> str:
    return json.dumps(asdict(failure))


def parse_record(text: str | bytes) -> Failure:
    return Failure(**json.loads(text))


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """Returns the earliest failure, or None.

    If all failures are within SAME_MOMENT_S, one that is not a bug precedes the bugs that it may
    have caused.
    """
    failures = sorted(failures, key=lambda failure: failure.time_s)
    if failures and failures[-1].time_s - failures[0].time_s < SAME_MOMENT_S:
        failures.sort(key=lambda failure: failure.code == DEFECT)  # stable: keeps the order by time
    return next(iter(failures), None)


def say(text: str) -> None:
    """Prints a line to stderr at once."""
    print(f"megarl: {log_text(text)}", file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """Ends a rank's process at once, without destructors and exit handlers.

    Those of a process group whose peers are gone can hang or abort, and so can those of vLLM and of
    CUDA graphs. Files must be closed before.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):  # for example if the disk is full or the terminal is closed
            stream.flush()
    os._exit(code)


def write_exit(run_dir: Path, code: int, failure: Failure | None = None, **facts: float) -> None:
    """Writes exit.json: the exit code, which torchrun would replace by 1, and the failure.

    Prints a message if the file cannot be written.
    """
    values = {"code": code, **facts}
    if failure:
        values |= {"rank": failure.rank, "error": failure.message, "during": failure.phase}
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomic(run_dir / "exit.json", json.dumps(values))
    except OSError as error:
        say(f"{run_dir / 'exit.json'} was not written ({error.strerror})")
