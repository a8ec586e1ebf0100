"""Trusted judges of untrusted texts, in processes that are forked for a batch of texts and have dropped their rights.

    items --batches--> child of a fork server: judge = factory(context); drop_rights(); a line per item --> Verdicts

A text that makes its judge raise an error, never end or fill the memory is worth 0, and the texts after it are judged
by a new child. If a judge cannot start, which is not the text's fault, there is no value.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from megarl.jail.fork_server import Child, ForkServer, ForkServerError
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
    """Judges made by ``factory(context)``, "module:function"; ``judge(*item)`` is a float or a Verdict with a value."""

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
            results = threads.map(
                lambda batch: self._judge_batch(context, batch, timeout_s), batches
            )
            return [verdict for result in results for verdict in result]

    def _judge_batch(self, context: Any, items: Sequence[Item], timeout_s: float) -> list[Verdict]:
        verdicts: list[Verdict] = []
        try:
            while len(verdicts) < len(items):
                verdicts += _judge_in_child(
                    self.server, (self.factory, context, items[len(verdicts) :], timeout_s)
                )
        except (ForkServerError, OSError) as error:
            verdicts += [Verdict(None, "no_judge", str(error))] * (len(items) - len(verdicts))
        return verdicts


def _judge_in_child(server: ForkServer, spec: Spec) -> list[Verdict]:
    """Verdicts on all items, or up to the first that ends the child. Raises ForkServerError if it made no judge."""
    factory, _, items, timeout_s = spec
    temporary = tempfile.TemporaryDirectory(prefix="megarl-judge-", ignore_cleanup_errors=True)
    reader, writer = os.pipe()
    with temporary as folder, open(reader, "rb", 0):
        with open(writer, "wb", 0):
            child = server.start("megarl.jail.judging:serve", (spec, folder), [writer])
        lines, status, is_late = _read_lines(child, reader, timeout_s)
    if lines[:1] != [READY]:
        detail = lines[0] if lines else "too late" if is_late else f"exit status {status}"
        raise ForkServerError(f"the judge {factory} did not start: {detail}")
    verdicts = [_parse(line) for line in lines[1 : len(items) + 1]]
    if len(verdicts) < len(items):
        cause = "timeout" if is_late else KINDS.get(-status, "crashed")
        limit = f" of {timeout_s:g} CPU seconds" if cause == "timeout" else ""
        verdicts.append(Verdict(0.0, cause, f"its judge ended with status {status}{limit}"))
    return verdicts


def _read_lines(child: Child, reader: int, timeout_s: float) -> tuple[list[str], int, bool]:
    """Returns what the child wrote, its exit status, and whether it was killed because a line took too long."""
    poll, written, deadline, is_late = select.poll(), bytearray(), time.monotonic() + START_S, True
    poll.register(reader, select.POLLIN)
    while poll.poll(max(deadline - time.monotonic(), 0) * 1000):
        if not (data := os.read(reader, 1 << 16)):
            is_late = False
            break
        written += data
        if b"\n" in data:
            deadline = time.monotonic() + timeout_s + BUSY_S
    status = child.kill() if is_late else child.wait(START_S)
    return written.decode("utf-8", "replace").split("\n")[:-1], status, is_late


def _parse(line: str) -> Verdict:
    value, cause, detail = (*line.split(" ", 2), "", "")[:3]
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    return (
        Verdict(number, cause, detail)
        if math.isfinite(number)
        else Verdict(0.0, "raised", f"returned {value}")
    )


# --- the child ----------------------------------------------------------------------------------------------------


def serve(job: tuple[Spec, str], out: int) -> None:
    """Writes a line when the judge is ready, then one per item."""
    (factory, context, items, timeout_s), folder = job
    packages = [
        path for path in sys.path if path.endswith("-packages")
    ]  # some modules are imported late
    limits = {
        "memory_bytes": MEMORY_BYTES,
        "cpu_s": math.ceil(timeout_s * len(items)) + 1,
        "disk_bytes": DISK_BYTES,
    }
    try:
        judge = resolve_name(factory)(context)
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
