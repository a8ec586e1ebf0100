"""Runs untrusted code in a separate process, and kills the process if it exceeds a limit.

    source, input --fork server--> jailed.py (its own process) --stdout, report pipe--> Run

    tests' jail --{"ask": call}--> checked here --call--> solution's jail
                <----value-------- checked here <--value--      the tests' jail reports the verdict

The solution has no pipe to the tests' jail. Its messages are passed on only if they have the form
that values.py describes.

A program is a single process that cannot start another, so killing it ends everything. Kinds of
failure: `timeout`, `memory`, `threads`, `output` (printed too much), `disk`, `forbidden` (used a
file, socket, process or signal without the right to), `syntax`, `exception`, `exited` (before it
replied), `crashed` (by a signal), `sandbox` (a limit could not be set, so the code did not run).
"""

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
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megarl.jail.filesystem import MAX_FILES
from megarl.jail.fork_server import Child, ForkServer, ForkServerError
from megarl.jail.jailed import MAX_THREADS
from megarl.jail.values import JailMessage, failure, is_value

# preloads modules that programs often import
SERVER = ForkServer(
    ["megarl.jail.jailed", "collections", "heapq", "itertools", "math", "re", "string", "typing"],
    [str(Path(__file__).parents[2])],
)
START_S = 20.0  # time for Python to start and to set the limits on a busy machine
TESTS_OUTPUT_BYTES = 64 << 20  # trusted tests may send this many more bytes, for arguments of calls
POLL_S = 0.1  # time between two checks of the folder's size
SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
)
BY_SIGNAL: dict[int, str] = {
    signal.SIGSYS: "forbidden",
    signal.SIGXCPU: "timeout",
    signal.SIGPROF: "timeout",
    signal.SIGKILL: "memory",  # sent by the kernel's OOM killer
}
# kinds that a jailed process reports (untrusted.failure_kind, untrusted.load)
REPORTED_KINDS = ["memory", "forbidden", "disk", "wrong_answer", "exited", "syntax"]


@dataclass(frozen=True)
class Limits:
    time_s: float = 4.0  # wall-clock time of a program or of one call
    memory_bytes: int = 512 << 20
    disk_bytes: int = 16 << 20
    output_bytes: int = 1 << 20
    strict: bool = True  # True: do not run the code if a limit cannot be enforced


@dataclass(frozen=True)
class Run:
    """The result of running a process; `kind`, the kind of failure, is "" if the code finished."""

    kind: str
    output: bytes = b""
    detail: str = ""


def missing_limits() -> dict[str, str]:
    """Returns {limit that this machine cannot enforce: reason}.

    The result is empty on Linux with Landlock and seccomp.
    """
    if not sys.platform.startswith("linux"):
        return {"all": f"{sys.platform} is not Linux"}
    limits = Limits(strict=False)
    process = JailedProcess("print(6 * 7)", limits, stdin="", deadline=time.monotonic() + START_S)
    run = process.run()
    if process.output != b"42\n":
        return {"all": f"a program does not answer ({run.kind or 'no output'} {run.detail})"}
    return process.missing or {}


def known_kind(kind: Any) -> str:
    """Returns `kind` if it is known, else "exception": the code could have written the report."""
    return kind if kind in REPORTED_KINDS else "exception"


class Ended(Exception):
    """Raised with (kind of failure, detail) if the process exceeded a limit or ended."""


@dataclass
class JailedProcess:
    """A jailed process with its temporary folder; call `close` to remove both.

    `run` runs a program to its end. Other processes answer requests one by one; `start`, `receive`
    and `ask` raise Ended if the process ends first.
    """

    source: Any  # a text, or an object for another `target`
    limits: Limits
    mode: str = "stdio"
    stdin: str | None = None  # input of a program; None: requests
    deadline: float = math.inf  # a ``time.monotonic`` time
    num_turns: int = 1
    start_s: float = START_S
    server: ForkServer | None = None  # None: SERVER
    target: str = "megarl.jail.jailed:run"
    missing: dict[str, str] | None = None  # limit -> error; None until the limits are set
    # untrusted: the code can write to the pipe as well
    reports: deque[JailMessage] = field(default_factory=deque)
    end: str = ""
    partial_report: bytes = b""
    report_bytes: int = 0  # received in this turn
    turn_deadline: float = math.inf
    output: bytearray = field(default_factory=bytearray)
    # set when the process has ended
    ended: Run = Run("")
    status: int = 0

    def __post_init__(self) -> None:
        self._steps = self._run()

    def close(self) -> None:
        self._steps.close()

    def run(self) -> Run:
        for _ in self._steps:
            pass
        return self.ended

    def start(self) -> None:
        """Starts the process and waits until its limits are set and the code is about to run."""
        while self.missing is None:
            self._step()

    def receive(self, until: float) -> JailMessage:
        """Returns the next report, which is untrusted. The process is killed at `until`."""
        self.turn_deadline = until
        self.report_bytes = 0
        while not self.reports:
            self._step()
        return self.reports.popleft()

    def ask(self, request: JailMessage, until: float) -> JailMessage:
        """Sends a request and returns the reply, which is untrusted.

        Raises Ended if the code has written to the report pipe or does not read the request.
        """
        if self.reports:
            raise Ended("forbidden", "the code wrote to the report pipe")
        data = memoryview(json.dumps(request).encode() + b"\n")
        writable = select.poll()
        writable.register(self._requests, select.POLLOUT)
        while data:
            try:
                data = data[os.write(self._requests, data) :]
            except BlockingIOError:
                if not writable.poll(max(until - time.monotonic(), 0) * 1000):
                    raise Ended("timeout", "the code did not read a request") from None
            except BrokenPipeError:
                break  # `receive` raises Ended with the cause
        return self.receive(until)

    def _step(self) -> None:
        if next(self._steps, "ended"):
            raise Ended(self.ended.kind or "exited", self.ended.detail)

    def _run(self) -> Generator[None, None, None]:
        """Runs the process step by step. Between the steps, nothing is read or limited."""
        temporary = tempfile.TemporaryDirectory(prefix="megarl-code-", ignore_cleanup_errors=True)
        with temporary as folder, ExitStack() as ours, ExitStack() as theirs:
            report, report_end = os.pipe()
            stdout, stdout_end = os.pipe()
            stdin, self._requests = os.pipe()
            for end in (report, stdout, self._requests):
                ours.callback(os.close, end)
            for end in (report_end, stdout_end, stdin):
                theirs.callback(os.close, end)
            os.set_blocking(self._requests, False)
            if self.stdin is not None:
                file = Path(folder, "stdin.txt")
                file.write_bytes(self.stdin.encode("utf-8", "replace"))
                stdin = theirs.enter_context(file.open("rb")).fileno()
            spec = asdict(self.limits) | {
                "folder": folder,
                "mode": self.mode,
                "source": self.source,
                "cpu_s": math.ceil(self.limits.time_s * self.num_turns) + 1,
                "readable": sorted({sys.base_prefix, sys.prefix, *SYSTEM} - {"/"}),
                "packages": sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}),
            }
            try:
                with theirs:
                    server = self.server or SERVER
                    process = server.start(self.target, spec, (stdin, stdout_end, report_end))
                try:
                    violation = yield from self._watch(process, stdout, report, folder)
                finally:
                    self.status = process.kill()
            except ForkServerError as error:
                self.ended = Run("sandbox", detail=str(error))
                return
        self.ended = self._classify(violation)

    def _watch(
        self,
        process: Child,
        stdout: int,
        report: int,
        folder: str,
    ) -> Generator[None, None, str]:
        """Reads output and reports until the process ends or exceeds a limit.

        Returns the kind of failure for which the process must be killed, or "" if it ended. The
        first report, sent before the code runs, starts its `time_s`; `receive` sets a new deadline.
        """
        # poll(), because select() fails for descriptors above 1023
        open_streams = {stdout, report}
        poll = select.poll()
        for stream in open_streams:
            poll.register(stream, select.POLLIN)
        next_check = 0.0
        self.turn_deadline = min(time.monotonic() + self.start_s, self.deadline)
        disk_bytes = self.limits.disk_bytes + len(self.stdin or "") + 4096
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
                    was_started = self.missing is not None
                    self._add_reports(data)
                    if not was_started:
                        limit = time.monotonic() + self.limits.time_s
                        self.turn_deadline = min(limit, self.deadline)
            if max(len(self.output), self.report_bytes) > self.limits.output_bytes:
                return "output"
            yield
            if time.monotonic() > self.turn_deadline:
                return "timeout"
            if time.monotonic() > next_check:
                next_check = time.monotonic() + POLL_S
                violation = _excess(process.pid, folder, disk_bytes)
                if violation:
                    return violation

    def _add_reports(self, data: bytes) -> None:
        self.report_bytes += len(data)
        *lines, self.partial_report = (self.partial_report + data).split(b"\n")
        for line in lines:
            report = None
            with suppress(ValueError, RecursionError):
                report = json.loads(line)
            if not isinstance(report, dict):
                report = {}
            if self.missing is None:
                self.missing = report.get("missing")
                continue
            if isinstance(report.get("end"), str):
                self.end = report["end"]
            self.reports.append(report)

    def _classify(self, violation: str) -> Run:
        if self.missing is None:
            return Run(
                "sandbox",
                detail=f"the jail ended with status {self.status} before its limits were set",
            )
        if self.missing and self.limits.strict:
            return Run("sandbox", detail=f"this machine cannot enforce limits: {self.missing}")
        if violation:
            kind = violation
        elif self.status < 0:
            kind = BY_SIGNAL.get(-self.status, "crashed")
        else:
            kind = self.end and known_kind(self.end)
        return Run(kind, bytes(self.output))


@dataclass
class Solution(JailedProcess):
    """A jailed solution whose functions are called."""

    mode: str = "solution"

    def load(self) -> None:
        self.start()
        until = self.turn_deadline
        while "loaded" not in self.receive(until):  # if loading fails, it reports how, and ends
            pass

    def call(self, operation: JailMessage, until: float) -> JailMessage:
        """Applies an operation (untrusted.execute) and checks the reply.

        Returns {"value", "arguments"?} or {"raised", "text", "kind"}.
        """
        reply = self.ask(operation, until)
        names = reply.get("raised")
        text = reply.get("text")
        if isinstance(names, list) and all(isinstance(word, str) for word in (*names, text)):
            return {"raised": names, "text": text, "kind": known_kind(reply.get("kind"))}
        if "value" not in reply or not is_value(reply["value"]):
            return failure("ValueError", "the reply is not a value")
        result = {"value": reply["value"]}
        changed = reply.get("arguments")
        if operation.get("in_place") and isinstance(changed, list) and is_value(changed):
            result["arguments"] = changed
        return result


@dataclass
class Tests(JailedProcess):
    """The jailed tests of a problem."""

    mode: str = "tests"

    def prepare(self, names: Sequence[str], errors: Sequence[str], until: float) -> None:
        """Starts the jail; `names` are the solution's, `errors` the exceptions it should define."""
        self.start()
        self.ask({"names": names, "errors": errors}, until)

    def run(self, text: str, solution: Solution | None, until: float) -> tuple[str, str]:
        """Executes statements. Returns (kind of failure, "" if there is none; reason)."""
        report = self.ask({"run": text}, until)
        while "ask" in report:
            assert solution is not None, "only statements without its names can run without it"
            report = self.ask(solution.call(report["ask"], until), until)
        return report["verdict"], report["why"]


def _excess(pid: int, folder: str, disk_bytes: int) -> str:
    """Returns the limit that a process exceeds ("threads" or "disk"), or "".

    Checks the limits that the kernel may not enforce. Counts files in the folder and open files
    without a name. Between two checks, a process can write up to FSIZE x NOFILE bytes.
    """
    with suppress(OSError):
        if os.stat(f"/proc/{pid}/task").st_nlink - 2 > MAX_THREADS:
            return "threads"
    blocks = {}
    for path, is_listed in ((folder, True), (f"/proc/{pid}/fd", False)):
        with suppress(OSError), os.scandir(path) as files:
            for file in files:
                with suppress(OSError):
                    status = file.stat(follow_symlinks=not is_listed)
                    if is_listed or (stat.S_ISREG(status.st_mode) and not status.st_nlink):
                        blocks[status.st_ino] = status.st_blocks
    if len(blocks) > MAX_FILES or 512 * sum(blocks.values()) > disk_bytes:
        return "disk"
    return ""
