"""Starts generated code in a jail of its own, feeds it, and stops it when it takes too much.

    source, input --empty folder--> jailed.py (a fresh Python) --stdout, report pipe--> Run(kind, output, replies)

One process a program; it can start no other, so ending it ends everything. Its kind of failure, by name: `timeout`,
`memory`, `output` (printed too much), `disk`, `forbidden` (a file, a socket, a process, a signal it may not have),
`syntax`, `exception`, `exited` (before it answered), `crashed` (by a signal), `sandbox` (a limit could not be set, so
the code was not run).
"""

from __future__ import annotations

import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Limits", "Run", "missing_limits", "run_calls", "run_program", "told"]

JAIL = Path(__file__).with_name("jailed.py")
START_S = 20.0  # for Python to start and to set the limits, on a busy machine
GLANCE_S = 0.1  # how often the folder's size is looked at
MAX_FILES = 1000
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
BY_SIGNAL = {signal.SIGSYS: "forbidden", signal.SIGXCPU: "timeout", signal.SIGKILL: "memory"}  # the kernel's killer
TOLD = ("memory", "forbidden", "disk", "wrong_answer", "exited", "syntax")  # and exception: what jail.kind_of says
STREAM = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    time_s: float = 4.0  # wall clock, of a program or of one call
    memory_bytes: int = 512 << 20
    disk_bytes: int = 16 << 20
    output_bytes: int = 1 << 20
    strict: bool = True  # refuse to run what cannot be limited


@dataclass(frozen=True, slots=True)
class Run:
    """`kind` is empty where the code ran to its end."""

    kind: str
    output: bytes = b""
    replies: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""


def missing_limits() -> dict[str, str]:
    """What this machine cannot enforce, and the reason; empty on a Linux with Landlock and seccomp."""
    if not sys.platform.startswith("linux"):
        return {"everything": f"{sys.platform} is not Linux"}
    lines = _Jailed("", Limits(strict=False), mode="probe").run(time.monotonic() + START_S).replies
    return lines[0]["missing"] if lines else {"everything": "the jail does not start"}


def run_program(source: str, stdin: str, limits: Limits, *, deadline: float = math.inf) -> Run:
    return _Jailed(source, limits, mode="stdio", stdin=stdin).run(deadline)


def run_calls(source: str, requests: Sequence[dict[str, Any]], limits: Limits, *, deadline: float = math.inf) -> Run:
    """Each request is {call, arguments}, {expression} or {statement}; `replies[i]` has a `value` or an `error`.
    There are fewer replies than requests when the code did not come that far."""
    run = _Jailed(source, limits, mode="calls", requests=requests).run(deadline)
    replies = [line for line in run.replies if isinstance(line.get("number"), int)]
    in_order = [line for place, line in enumerate(replies) if line["number"] == place]
    return Run(run.kind, run.output, in_order, run.why)


def told(kind: Any) -> str:
    """A kind that came out of the jail: the code could have written there too, so only known ones are repeated."""
    return kind if kind in TOLD else "exception"


class _Jailed:
    """One process, from its folder's making to its folder's end."""

    def __init__(
        self, source: str, limits: Limits, *, mode: str, stdin: str = "", requests: Sequence[dict[str, Any]] = ()
    ) -> None:
        self.limits = limits
        self.mode = mode
        self.files = {"solution.py": source, "stdin.txt": stdin, "requests.json": json.dumps(list(requests))}
        self.turns = 1 + len(requests)
        self.lines: list[dict[str, Any]] = []
        self.partial = b""
        self.output = bytearray()
        self.received = 0

    def run(self, deadline: float) -> Run:
        folder = tempfile.mkdtemp(prefix="megarl-code-")
        try:
            for name, text in self.files.items():
                Path(folder, name).write_bytes(text.encode("utf-8", "replace"))
            report, writes = os.pipe()
            try:
                process = self._start(folder, writes)
            finally:
                os.close(writes)
            try:
                stopped = self._watch(process, report, folder, deadline)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
                os.close(report)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return self._judged(stopped, process.returncode)

    def _start(self, folder: str, report: int) -> subprocess.Popen[bytes]:
        limits = self.limits
        spec = {
            "folder": folder,
            "mode": self.mode,
            "report": report,
            "strict": limits.strict,
            "memory_bytes": limits.memory_bytes,
            "cpu_s": math.ceil(limits.time_s * self.turns) + 1,
            "disk_bytes": limits.disk_bytes,
            "readable": [path for path in (sys.base_prefix, sys.prefix, *SYSTEM) if path != "/"],
            "packages": sorted({sysconfig.get_paths()[name] for name in ("purelib", "platlib")}),
        }
        environment = {"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
        with open(Path(folder, "stdin.txt"), "rb") as stdin:
            return subprocess.Popen(
                [sys.executable, "-S", "-P", "-s", "-B", str(JAIL), json.dumps(spec)],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=(report,),
                start_new_session=True,
            )

    def _watch(self, process: subprocess.Popen[bytes], report: int, folder: str, deadline: float) -> str:
        """Reads until the process is gone; why it must be stopped, or nothing. The clock starts again at each turn."""
        assert process.stdout is not None
        stdout = process.stdout.fileno()
        reading, seen, poll = {stdout, report}, 0, select.poll()  # select() ends at 1024 open files
        for stream in reading:
            poll.register(stream, select.POLLIN)
        late = min(time.monotonic() + START_S, deadline)
        while True:
            if not reading:
                time.sleep(GLANCE_S / 10)
            for stream, _ in poll.poll(GLANCE_S * 1000) if reading else ():
                data = os.read(stream, STREAM)
                if not data:
                    reading.discard(stream)
                    poll.unregister(stream)
                elif stream == stdout:
                    self.output += data
                else:
                    self._take(data)
            if not reading and process.poll() is not None:
                return ""
            if len(self.output) > self.limits.output_bytes or self.received > self.limits.output_bytes * self.turns:
                return "output"
            if seen < len(self.lines) <= self.turns + 1:  # more lines are the code's own doing, to win time
                seen = len(self.lines)
                late = min(time.monotonic() + self.limits.time_s, deadline)
            if time.monotonic() > late:
                return "timeout" if self.lines and time.monotonic() < deadline else "sandbox"
            if self._takes_too_much(folder):
                return "disk"

    def _take(self, data: bytes) -> None:
        """Whole lines of the report pipe; the code could write there too, so nothing in them is believed."""
        self.received += len(data)
        *whole, self.partial = (self.partial + data).split(b"\n")
        for line in whole:
            with suppress(ValueError, RecursionError):
                found = json.loads(line)
                if isinstance(found, dict):
                    self.lines.append(found)

    def _takes_too_much(self, folder: str) -> bool:
        with suppress(FileNotFoundError), os.scandir(folder) as files:
            sizes = [file.stat(follow_symlinks=False).st_size for file in files]
            return len(sizes) > MAX_FILES or sum(sizes) > self.limits.disk_bytes + sum(map(len, self.files.values()))
        return False

    def _judged(self, stopped: str, status: int) -> Run:
        first = self.lines[0] if self.lines else {}
        missing = first.get("missing")
        if missing is None:
            return Run("sandbox", why=f"the jail ended with status {status} before its limits were set")
        if missing and self.limits.strict:
            return Run("sandbox", why=f"this machine cannot limit {missing}")
        if stopped:
            return Run(stopped, bytes(self.output), self.lines)
        end = next((line["end"] for line in self.lines if isinstance(line.get("end"), str)), None)
        if status < 0:
            kind = BY_SIGNAL.get(signal.Signals(-status), "crashed")
        elif end is None:
            kind = "exited" if self.mode == "calls" else ""  # a program may end itself, and is judged by its output
        else:
            kind = told(end) if end else ""
        return Run(kind, bytes(self.output), self.lines)
