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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

JAIL = Path(__file__).with_name("jailed.py")
SCRIPTS = str(JAIL.parent)
START_S = 20.0  # for Python to start and to set the limits, on a busy machine
POLL_S = 0.1  # between two checks of the folder's size
MAX_FILES = 1000
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
BY_SIGNAL = {signal.SIGSYS: "forbidden", signal.SIGXCPU: "timeout", signal.SIGKILL: "memory"}  # SIGKILL: OOM killer
REPORTED_KINDS = ("memory", "forbidden", "disk", "wrong_answer", "exited", "syntax")  # of jailed.failure_kind
READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    time_s: float = 4.0  # wall clock, of a program or of one call
    memory_bytes: int = 512 << 20
    disk_bytes: int = 16 << 20
    output_bytes: int = 1 << 20
    strict: bool = True  # do not run the code if a limit cannot be enforced


@dataclass(frozen=True, slots=True)
class CallResult:
    """The value of one request, or the kind of its failure."""

    value: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """`kind` of failure is empty if the code ran to its end; `results` has an entry per completed request."""

    kind: str
    output: bytes = b""
    results: Sequence[CallResult] = ()
    detail: str = ""


def missing_limits() -> dict[str, str]:
    """Returns the limits this machine cannot enforce, with reasons; empty on Linux with Landlock and seccomp."""
    if not sys.platform.startswith("linux"):
        return {"all": f"{sys.platform} is not Linux"}
    process = _JailedProcess("", Limits(strict=False), mode="probe")
    process.run(time.monotonic() + START_S)
    return process.reports[0]["missing"] if process.reports else {"all": "the jail does not start"}


def run_program(source: str, stdin: str, limits: Limits, *, deadline: float = math.inf) -> Run:
    """Run `source` as a program; `deadline` is a time of ``time.monotonic``."""
    return _JailedProcess(source, limits, mode="stdio", stdin=stdin).run(deadline)


def run_calls(source: str, requests: Sequence[dict[str, Any]], limits: Limits, *, deadline: float = math.inf) -> Run:
    """Load `source` and execute the requests in order: {call, arguments}, {expression} or {statement}."""
    process = _JailedProcess(source, limits, mode="calls", requests=requests)
    run = process.run(deadline)
    replies = [report for report in process.reports if isinstance(report.get("number"), int)]
    in_order = [reply for number, reply in enumerate(replies) if reply["number"] == number][: len(requests)]
    return replace(run, results=[_result(reply) for reply in in_order])


def _result(reply: dict[str, Any]) -> CallResult:
    if "value" in reply:
        return CallResult(from_json(reply["value"]))
    return CallResult(error=_known_kind(reply.get("error")))


def from_json(tagged: Any) -> Any:
    """Decodes the value that jailed.to_json encoded. Malformed input becomes an object that equals nothing."""
    if not isinstance(tagged, dict) or len(tagged) != 1:
        return tagged
    ((kind, content),) = tagged.items()
    try:
        if kind == "int":
            return int(content, 16)
        if kind == "dict":
            return {from_json(key): from_json(item) for key, item in content}
        items = [from_json(item) for item in content]
        return {"tuple": tuple, "list": list, "set": set}[kind](items)
    except (TypeError, ValueError, KeyError, RecursionError):
        return object()


def _known_kind(kind: Any) -> str:
    """Maps unknown kinds to "exception", because the code could have written the report itself."""
    return kind if kind in REPORTED_KINDS else "exception"


@dataclass
class _JailedProcess:
    """One process, from the creation of its folder to its removal."""

    source: str
    limits: Limits
    mode: str
    stdin: str = ""
    requests: Sequence[dict[str, Any]] = ()
    reports: list[dict[str, Any]] = field(default_factory=list)  # untrusted: the code can write to the pipe as well
    partial_report: bytes = b""
    report_bytes: int = 0
    output: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        requests = json.dumps(list(self.requests))
        self.files = {"solution.py": self.source, "stdin.txt": self.stdin, "requests.json": requests}
        self.num_turns = 1 + len(self.requests)  # loading the code and each request are timed separately

    def run(self, deadline: float) -> Run:
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
                violation = self._watch(process, report, folder, deadline)
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
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=(report,),
                start_new_session=True,
            )

    def _watch(self, process: subprocess.Popen[bytes], report: int, folder: str, deadline: float) -> str:
        """Read until the process ends by itself. Returns the limit it exceeded, for which it must be killed, or "".

        Each turn has `time_s`; a report starts the next one.
        """
        assert process.stdout is not None
        stdout = process.stdout.fileno()
        open_streams, poll = {stdout, report}, select.poll()  # select() fails above 1024 open files
        for stream in open_streams:
            poll.register(stream, select.POLLIN)
        turns_seen, turn_deadline = 0, min(time.monotonic() + START_S, deadline)
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
            if max(len(self.output), self.report_bytes / self.num_turns) > self.limits.output_bytes:
                return "output"
            if turns_seen < len(self.reports) <= self.num_turns + 1:  # any further ones are the code's own
                turns_seen = len(self.reports)
                turn_deadline = min(time.monotonic() + self.limits.time_s, deadline)
            if time.monotonic() > turn_deadline:
                return "timeout" if self.reports and time.monotonic() < deadline else "sandbox"
            if self._exceeds_disk(folder):
                return "disk"

    def _add_reports(self, data: bytes) -> None:
        self.report_bytes += len(data)
        *lines, self.partial_report = (self.partial_report + data).split(b"\n")
        for line in lines:
            with suppress(ValueError, RecursionError):
                report = json.loads(line)
                if isinstance(report, dict):
                    self.reports.append(report)

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
            kind = BY_SIGNAL.get(signal.Signals(-status), "crashed")
        elif end is None:
            kind = "exited" if self.mode == "calls" else ""  # a program may exit; its output decides
        else:
            kind = _known_kind(end) if end else ""
        return Run(kind, bytes(self.output))
