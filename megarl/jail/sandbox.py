"""Starts untrusted code in a separate process, sends its input, and kills it if it exceeds a limit.

    source, input --fork server--> jailed.py (a process of its own) --stdout, report pipe--> Run(kind, output)

A program is one process, which cannot start another, so killing it ends everything. Kinds of failure: `timeout`,
`memory`, `threads`, `output` (printed too much), `disk`, `forbidden` (a file, socket, process or signal it has no right
to), `syntax`, `exception`, `exited` (before it answered), `crashed` (by a signal), `sandbox` (a limit could not be set,
so the code did not run).
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import stat
import sys
import sysconfig
import tempfile
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megarl.jail.filesystem import MAX_FILES
from megarl.jail.fork_server import Child, ForkServer, ForkServerError
from megarl.jail.jailed import MAX_THREADS

COMMON = (
    "collections",
    "heapq",
    "itertools",
    "math",
    "re",
    "string",
    "typing",
)  # imported once, for all programs
SERVER = ForkServer(modules=("megarl.jail.jailed", *COMMON), path=(str(Path(__file__).parents[2]),))
START_S = 20.0  # for Python to start and to set the limits, on a busy machine
POLL_S = 0.1  # between two checks of the folder's size
SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
)
# SIGKILL: the kernel's OOM killer
BY_SIGNAL: dict[int, str] = {
    signal.SIGSYS: "forbidden",
    signal.SIGXCPU: "timeout",
    signal.SIGKILL: "memory",
}
REPORTED_KINDS = (
    "memory",
    "forbidden",
    "disk",
    "wrong_answer",
    "exited",
    "syntax",
)  # of jailed.failure_kind
MALFORMED: dict[str, Any] = {}
Steps = Generator[None, None, str]


@dataclass(frozen=True, slots=True)
class Limits:
    time_s: float = 4.0  # wall clock, of a program or of one call
    memory_bytes: int = 512 << 20
    disk_bytes: int = 16 << 20
    output_bytes: int = 1 << 20
    strict: bool = True  # do not run the code if a limit cannot be enforced


@dataclass(frozen=True, slots=True)
class Run:
    """`kind` of failure is empty if the code ran to its end."""

    kind: str
    output: bytes = b""
    detail: str = ""


def missing_limits() -> dict[str, str]:
    """Returns the limits this machine cannot enforce, with reasons; empty on Linux with Landlock and seccomp."""
    if not sys.platform.startswith("linux"):
        return {"all": f"{sys.platform} is not Linux"}
    process = JailedProcess("", Limits(strict=False), mode="probe")
    process.run(time.monotonic() + START_S)
    return process.reports[0]["missing"] if process.reports else {"all": "the jail does not start"}


def run_program(source: str, stdin: str, limits: Limits, *, deadline: float = math.inf) -> Run:
    """Run `source` as a program; `deadline` is a time of ``time.monotonic``."""
    return JailedProcess(source, limits, mode="stdio", stdin=stdin).run(deadline)


def known_kind(kind: Any) -> str:
    """Maps unknown kinds to "exception", because the code could have written the report itself."""
    return kind if kind in REPORTED_KINDS else "exception"


@dataclass
class JailedProcess:
    """One process, from the creation of its folder to its removal."""

    source: str
    limits: Limits
    mode: str
    stdin: str = ""
    requests: int | None = None  # descriptor to use as the standard input instead
    num_turns: int = 1
    reports: list[dict[str, Any]] = field(
        default_factory=list
    )  # untrusted: the code can write to the pipe as well
    partial_report: bytes = b""
    report_bytes: int = 0  # of this turn
    turn_deadline: float = math.inf
    output: bytearray = field(default_factory=bytearray)
    ended: Run = Run("")  # set once `steps` is exhausted

    def __post_init__(self) -> None:
        self.files = {"solution.py": self.source, "stdin.txt": self.stdin}

    def run(self, deadline: float) -> Run:
        for _ in self.steps(deadline):
            pass
        return self.ended

    def steps(self, deadline: float) -> Generator[None, None, None]:
        """Yields after every report, while nothing is read or limited; the caller may set `turn_deadline`."""
        temporary = tempfile.TemporaryDirectory(prefix="megarl-code-", ignore_cleanup_errors=True)
        (report, report_end), (stdout, stdout_end) = os.pipe(), os.pipe()
        with temporary as folder, open(report, "rb", 0), open(stdout, "rb", 0):
            for name, text in self.files.items():
                Path(folder, name).write_bytes(text.encode("utf-8", "replace"))
            try:
                with open(report_end, "wb", 0), open(stdout_end, "wb", 0):
                    process = self._start(folder, stdout_end, report_end)
                try:
                    violation = yield from self._watch(process, stdout, report, folder, deadline)
                finally:
                    status = process.kill()
            except ForkServerError as error:
                self.ended = Run("sandbox", detail=str(error))
                return
        self.ended = self._classify(violation, status)

    def _start(self, folder: str, stdout: int, report: int) -> Child:
        spec = asdict(self.limits) | {
            "folder": folder,
            "mode": self.mode,
            "cpu_s": math.ceil(self.limits.time_s * self.num_turns) + 1,
            "readable": [path for path in (sys.base_prefix, sys.prefix, *SYSTEM) if path != "/"],
            "packages": sorted({sysconfig.get_paths()[name] for name in ("purelib", "platlib")}),
        }
        with open(Path(folder, "stdin.txt"), "rb") as stdin:
            requests = stdin.fileno() if self.requests is None else self.requests
            return SERVER.start("megarl.jail.jailed:run", spec, (requests, stdout, report))

    def _watch(
        self, process: Child, stdout: int, report: int, folder: str, deadline: float
    ) -> Steps:
        """Read until the process ends by itself ("") or exceeds a limit, for which it must be killed; returns that.

        The first report, before the code runs, starts its `time_s`; the caller of `steps` may prolong them.
        """
        open_streams, poll = {stdout, report}, select.poll()  # select() fails above 1024 open files
        for stream in open_streams:
            poll.register(stream, select.POLLIN)
        num_seen, next_check, self.turn_deadline = 0, 0.0, min(time.monotonic() + START_S, deadline)
        disk_bytes = self.limits.disk_bytes + sum(4096 + len(text) for text in self.files.values())
        while True:
            if not open_streams:
                with suppress(TimeoutError):
                    process.wait(POLL_S)
                    return ""
            for stream, _ in poll.poll(POLL_S * 1000) if open_streams else ():
                data = os.read(stream, 1 << 16)
                if not data:
                    open_streams.discard(stream)
                    poll.unregister(stream)
                elif stream == stdout:
                    self.output += data
                else:
                    self._add_reports(data)
            if max(len(self.output), self.report_bytes) > self.limits.output_bytes:
                return "output"
            if self.reports and not num_seen:
                self.turn_deadline = min(time.monotonic() + self.limits.time_s, deadline)
            if num_seen < len(self.reports):
                num_seen = len(self.reports)
                yield
            if time.monotonic() > self.turn_deadline:
                return "timeout" if self.reports else "sandbox"
            if time.monotonic() > next_check:
                next_check = time.monotonic() + POLL_S
                if violation := _excess(process.pid, folder, disk_bytes):
                    return violation

    def _add_reports(self, data: bytes) -> None:
        self.report_bytes += len(data)
        *lines, self.partial_report = (self.partial_report + data).split(b"\n")
        for line in lines:
            report = None
            with suppress(ValueError, RecursionError):
                report = json.loads(line)
            self.reports.append(report if isinstance(report, dict) else MALFORMED)

    def _classify(self, violation: str, status: int) -> Run:
        missing = self.reports[0].get("missing") if self.reports else None
        if missing is None:
            return Run(
                "sandbox", detail=f"the jail ended with status {status} before its limits were set"
            )
        if missing and self.limits.strict:
            return Run("sandbox", detail=f"this machine cannot enforce limits: {missing}")
        end = next(
            (report["end"] for report in self.reports if isinstance(report.get("end"), str)), None
        )
        if violation:
            kind = violation
        elif status < 0:
            kind = BY_SIGNAL.get(-status, "crashed")
        elif end is None:
            kind = (
                "" if self.mode == "stdio" else "exited"
            )  # a program may exit; its output decides
        else:
            kind = known_kind(end) if end else ""
        return Run(kind, bytes(self.output))


def _excess(pid: int, folder: str, disk_bytes: int) -> str:
    """The limit that a process exceeds where the kernel does not enforce it: "threads", "disk" or "".

    Counts files in the folder and open ones without a name. Between checks a process can write FSIZE x NOFILE bytes.
    """
    with suppress(OSError):
        if os.stat(f"/proc/{pid}/task").st_nlink - 2 > MAX_THREADS:
            return "threads"
    blocks: dict[int, int] = {}
    for path, is_listed in ((folder, True), (f"/proc/{pid}/fd", False)):
        with suppress(OSError), os.scandir(path) as files:
            for file in files:
                with suppress(OSError):
                    status = file.stat(follow_symlinks=not is_listed)
                    if is_listed or (stat.S_ISREG(status.st_mode) and not status.st_nlink):
                        blocks[status.st_ino] = status.st_blocks
    return "disk" if len(blocks) > MAX_FILES or 512 * sum(blocks.values()) > disk_bytes else ""
