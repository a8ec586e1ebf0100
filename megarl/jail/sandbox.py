"""Starts untrusted code in a separate process, sends its input, and kills it if it exceeds a limit.

    source, input --empty folder--> jailed.py (a fresh Python) --stdout, report pipe--> Run(kind, output, results)

Every program runs in one process, which cannot start another, so killing it ends everything. Kinds of failure:
`timeout`, `memory`, `output` (printed too much), `disk`, `forbidden` (used a file, socket, process or signal it has no
right to), `syntax`, `exception`, `exited` (before it answered), `crashed` (by a signal), and `sandbox` (a limit could
not be set, so the code did not run).
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
from collections.abc import Generator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

JAIL = Path(__file__).with_name("jailed.py")
SCRIPTS = str(JAIL.parent)
START_S = 20.0  # for Python to start and to set the limits, on a busy machine
POLL_S = 0.1  # between two checks of the folder's size
MAX_FILES = 1000
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
BY_SIGNAL: dict[int, str] = {
    signal.SIGSYS: "forbidden",
    signal.SIGXCPU: "timeout",
    signal.SIGKILL: "memory",
}  # SIGKILL: OOM killer
REPORTED_KINDS = ("memory", "forbidden", "disk", "wrong_answer", "exited", "syntax")  # of jailed.failure_kind
READ_BYTES = 1 << 16
MALFORMED: dict[str, Any] = {}
Returned = TypeVar("Returned")
Steps = Generator[None, None, Returned]


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
    reports: list[dict[str, Any]] = field(default_factory=list)  # untrusted: the code can write to the pipe as well
    partial_report: bytes = b""
    report_bytes: int = 0  # of this turn
    turn_deadline: float = math.inf
    output: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.files = {"solution.py": self.source, "stdin.txt": self.stdin}

    def run(self, deadline: float) -> Run:
        steps = self.steps(deadline)
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                return ended.value

    def steps(self, deadline: float) -> Steps[Run]:
        """Yields after every report, while nothing is read or limited; the caller may set `turn_deadline`."""
        folder = tempfile.mkdtemp(prefix="megarl-code-")
        try:
            for name, text in self.files.items():
                Path(folder, name).write_bytes(text.encode("utf-8", "replace"))
            report, report_writer = os.pipe()
            try:
                process = self._start(folder, report_writer)
            finally:
                os.close(report_writer)
            try:
                violation = yield from self._watch(process, report, folder, deadline)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
                os.close(report)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return self._classify(violation, process.returncode)

    def _start(self, folder: str, report: int) -> subprocess.Popen[bytes]:
        spec = asdict(self.limits) | {
            "folder": folder,
            "scripts": SCRIPTS,
            "mode": self.mode,
            "report": report,
            "cpu_s": math.ceil(self.limits.time_s * self.num_turns) + 1,
            "readable": [path for path in (sys.base_prefix, sys.prefix, *SYSTEM) if path != "/"],
            "packages": sorted({sysconfig.get_paths()[name] for name in ("purelib", "platlib")}),
        }
        environment = {"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
        with open(Path(folder, "stdin.txt"), "rb") as stdin:
            return subprocess.Popen(
                [sys.executable, "-S", "-P", "-s", "-B", str(JAIL), json.dumps(spec)],
                stdin=stdin if self.requests is None else self.requests,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=(report,),
                start_new_session=True,
            )

    def _watch(self, process: subprocess.Popen[bytes], report: int, folder: str, deadline: float) -> Steps[str]:
        """Read until the process ends by itself. Returns the limit it exceeded, for which it must be killed, or "".

        The first report, before the code runs, starts its `time_s`; the caller of `steps` may prolong them.
        """
        assert process.stdout is not None
        stdout = process.stdout.fileno()
        open_streams, poll = {stdout, report}, select.poll()  # select() fails above 1024 open files
        for stream in open_streams:
            poll.register(stream, select.POLLIN)
        num_seen, self.turn_deadline = 0, min(time.monotonic() + START_S, deadline)
        while True:
            if not open_streams:
                time.sleep(POLL_S / 10)
            for stream, _ in poll.poll(POLL_S * 1000) if open_streams else ():
                data = os.read(stream, READ_BYTES)
                if not data:
                    open_streams.discard(stream)
                    poll.unregister(stream)
                elif stream == stdout:
                    self.output += data
                else:
                    self._add_reports(data)
            if not open_streams and process.poll() is not None:
                return ""
            if max(len(self.output), self.report_bytes) > self.limits.output_bytes:
                return "output"
            if self.reports and not num_seen:
                self.turn_deadline = min(time.monotonic() + self.limits.time_s, deadline)
            if num_seen < len(self.reports):
                num_seen = len(self.reports)
                yield
            if time.monotonic() > self.turn_deadline:
                return "timeout" if self.reports else "sandbox"
            if self._exceeds_disk(folder):
                return "disk"

    def _add_reports(self, data: bytes) -> None:
        self.report_bytes += len(data)
        *lines, self.partial_report = (self.partial_report + data).split(b"\n")
        for line in lines:
            report = None
            with suppress(ValueError, RecursionError):
                report = json.loads(line)
            self.reports.append(report if isinstance(report, dict) else MALFORMED)

    def _exceeds_disk(self, folder: str) -> bool:
        with suppress(FileNotFoundError), os.scandir(folder) as files:
            sizes = [file.stat(follow_symlinks=False).st_size for file in files]
            return len(sizes) > MAX_FILES or sum(sizes) > self.limits.disk_bytes + sum(map(len, self.files.values()))
        return False

    def _classify(self, violation: str, status: int) -> Run:
        missing = self.reports[0].get("missing") if self.reports else None
        if missing is None:
            return Run("sandbox", detail=f"the jail ended with status {status} before its limits were set")
        if missing and self.limits.strict:
            return Run("sandbox", detail=f"this machine cannot enforce limits: {missing}")
        end = next((report["end"] for report in self.reports if isinstance(report.get("end"), str)), None)
        if violation:
            kind = violation
        elif status < 0:
            kind = BY_SIGNAL.get(-status, "crashed")
        elif end is None:
            kind = "" if self.mode == "stdio" else "exited"  # a program may exit; its output decides
        else:
            kind = known_kind(end) if end else ""
        return Run(kind, bytes(self.output))
