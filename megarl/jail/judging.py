"""Trusted judges of untrusted texts, in processes that are forked for a batch of texts and have dropped their rights.

    items --batches--> child of a fork server: judge = factory(context); drop_rights(); a line per item --> Verdicts

A text is data to its judge, and what it does to the judge stays in the child. If it raises an error, never ends, or
fills the memory, it is worth 0, and the texts after it are judged by a new child. A judge that cannot start is not the
text's fault: it has no value.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.jail.fork_server import Child, ForkServer, ForkServerError, load
from megarl.jail.jailed import drop_rights
from megarl.jail.sandbox import BY_SIGNAL, SYSTEM

BATCHES = (16, 128)  # fewest and most texts judged by one child
MAX_CHILDREN = 4
START_S = 60.0  # for a child to make its judge
BUSY_S = 20.0  # a child may wait this long for a processor, beyond its limit of CPU seconds
MEMORY_BYTES, DISK_BYTES = 2 << 30, 1 << 20
READY = "ready"
KINDS = BY_SIGNAL | {int(signal.SIGPROF): "timeout"}


Item = tuple[Any, ...]
Spec = tuple[str, Any, Sequence[Item], float]  # factory, context, items, timeout_s


@dataclass(frozen=True, slots=True)
class Verdict:
    """`value` None: not judged, through no fault of the text. `cause` is one word, `detail` a sentence."""

    value: float | None
    cause: str = ""
    detail: str = ""


@dataclass(frozen=True)
class JudgePool:
    """Judges from any thread. `factory` is "module:function"; ``factory(context)`` returns the judge.

    ``judge(*item)`` returns a float, or a Verdict with a value.
    """

    factory: str
    server: ForkServer

    @classmethod
    def of(cls, factory: str, *modules: str) -> JudgePool:
        path = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        return cls(factory, ForkServer([*modules, factory.partition(":")[0]], path))

    def judge(self, context: Any, items: Sequence[Item], *, timeout_s: float) -> list[Verdict]:
        """One verdict per item, in order. `timeout_s` is in CPU seconds of one item."""
        children = min(MAX_CHILDREN, os.cpu_count() or 1)
        size = sorted((*BATCHES, -(-len(items) // children)))[1]
        batches = [items[start : start + size] for start in range(0, len(items), size)]
        if len(batches) <= 1:
            return self._judge_batch(context, items, timeout_s)
        with ThreadPoolExecutor(children) as threads:
            results = threads.map(lambda batch: self._judge_batch(context, batch, timeout_s), batches)
            return [verdict for result in results for verdict in result]

    def _judge_batch(self, context: Any, items: Sequence[Item], timeout_s: float) -> list[Verdict]:
        verdicts: list[Verdict] = []
        try:
            while len(verdicts) < len(items):
                run = _Run(self.server, (self.factory, context, items[len(verdicts) :], timeout_s))
                verdicts += run.verdicts()
        except (ForkServerError, OSError) as error:
            verdicts += [Verdict(None, "no_judge", str(error))] * (len(items) - len(verdicts))
        return verdicts


@dataclass
class _Run:
    """One child, on all items or up to the first that ends it."""

    server: ForkServer
    spec: Spec
    is_late: bool = False
    lines: list[str] = field(default_factory=list)

    def verdicts(self) -> list[Verdict]:
        """At least one verdict. Raises ForkServerError if the child made no judge."""
        reader, writer = os.pipe()
        folder = tempfile.mkdtemp(prefix="megarl-judge-")
        try:
            try:
                child = self.server.start("megarl.jail.judging:serve", (self.spec, folder), [writer])
            finally:
                os.close(writer)
            status = self._read(child, reader)
        finally:
            os.close(reader)
            shutil.rmtree(folder, ignore_errors=True)
        if self.lines[:1] != [READY]:
            detail = self.lines[0] if self.lines else "too late" if self.is_late else f"exit status {status}"
            raise ForkServerError(f"the judge {self.spec[0]} did not start: {detail}")
        verdicts = [_parse(line) for line in self.lines[1 : len(self.spec[2]) + 1]]
        if len(verdicts) < len(self.spec[2]):
            cause = "timeout" if self.is_late else KINDS.get(-status, "crashed")
            limit = f" of {self.spec[3]:g} CPU seconds" if cause == "timeout" else ""
            verdicts.append(Verdict(0.0, cause, f"its judge ended with status {status}{limit}"))
        return verdicts

    def _read(self, child: Child, reader: int) -> int:
        """Reads lines until the child ends, or is killed because a line takes too long. Returns its exit status."""
        poll, partial, deadline = select.poll(), b"", time.monotonic() + START_S
        poll.register(reader, select.POLLIN)
        while poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            if not (data := os.read(reader, 1 << 16)):
                return child.wait(START_S)
            *lines, partial = (partial + data).split(b"\n")
            self.lines += [line.decode("utf-8", "replace") for line in lines]
            if lines:
                deadline = time.monotonic() + self.spec[3] + BUSY_S
        self.is_late = True
        return child.kill()


def _parse(line: str) -> Verdict:
    value, cause, detail = (*line.split(" ", 2), "", "")[:3]
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    return Verdict(number, cause, detail) if math.isfinite(number) else Verdict(0.0, "raised", f"returned {value}")


# --- the child ----------------------------------------------------------------------------------------------------


def serve(job: tuple[Spec, str], out: int) -> None:
    """Writes a line when the judge is ready, then one per item."""
    (factory, context, items, timeout_s), folder = job
    packages = [path for path in sys.path if path.endswith("-packages")]  # some modules are imported late
    limits = {"memory_bytes": MEMORY_BYTES, "cpu_s": math.ceil(timeout_s * len(items)) + 1, "disk_bytes": DISK_BYTES}
    try:
        judge = load(factory)(context)
        drop_rights({**limits, "folder": folder, "readable": [sys.base_prefix, *packages, *SYSTEM]})
    except Exception as error:  # noqa: BLE001 (told to the caller)
        _write(out, f"{type(error).__name__}: {error}")
        return
    _write(out, READY)
    for item in items:
        signal.setitimer(signal.ITIMER_PROF, timeout_s)  # CPU time; ends the process
        _write(out, _line(judge, item))


def _line(judge: Any, item: Item) -> str:
    try:
        result = judge(*item)
        if isinstance(result, Verdict):
            return f"{result.value!r} {result.cause} {result.detail}"
        return repr(float(result))
    except MemoryError:
        return "0.0 memory the judge ran out of memory"
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the text caused it)
        reason = ""
        with suppress(Exception):
            reason = str(error)[:200]
        return f"0.0 raised its judge raised {type(error).__name__}: {reason}"


def _write(out: int, line: str) -> None:
    os.write(out, line.replace("\n", " ").encode("utf-8", "replace") + b"\n")
