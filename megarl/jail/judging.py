"""Trusted judges of untrusted texts, in forked processes that have dropped their rights.

    items --batches--> child of a fork server: judge = factory(context); drop_rights()
                                               --a line per item--> Verdicts

A text that makes its judge raise an error, never end or fill the memory is worth 0, and the texts
after it are judged by a new child. If a judge cannot start, which is not the text's fault, there is
no value.
"""

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
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from megarl.jail.fork_server import Child, ForkServer, ForkServerError
from megarl.jail.jailed import drop_rights
from megarl.jail.sandbox import BY_SIGNAL, SYSTEM

# fewest and most texts judged by one child
MIN_BATCH = 16
MAX_BATCH = 128
MAX_CHILDREN = 4
START_S = 60.0  # for a child to make its judge
BUSY_S = 20.0  # a child may wait this long for a processor, beyond its limit of CPU seconds
MEMORY_BYTES = 2 << 30
DISK_BYTES = 1 << 20
READY = "ready"
KINDS = BY_SIGNAL | {int(signal.SIGPROF): "timeout"}

Item = tuple[Any, ...]
Spec = tuple[str, Any, Sequence[Item], float]  # factory, context, items, timeout_s


@dataclass(frozen=True)
class Verdict:
    """The value of a text, None if it was not judged through no fault of its own.

    `cause` is one word, `detail` a sentence.
    """

    value: float | None
    cause: str = ""
    detail: str = ""


class JudgePool:
    """Runs judges made by ``factory(context)``; `factory` is "module:function".

    ``judge(*item)`` returns a float or a Verdict with a value.
    """

    def __init__(self, factory: str, *modules: str) -> None:
        self.factory = factory
        path = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        self.server = ForkServer([*modules, factory.partition(":")[0]], path)

    def judge(self, context: Any, items: Sequence[Item], *, timeout_s: float) -> list[Verdict]:
        """Returns one verdict per item, in order. `timeout_s` is in CPU seconds of one item."""
        children = min(MAX_CHILDREN, os.cpu_count() or 1)
        size = min(max(math.ceil(len(items) / children), MIN_BATCH), MAX_BATCH)
        batches = [items[start : start + size] for start in range(0, len(items), size)]

        def judge_batch(batch: Sequence[Item]) -> list[Verdict]:
            verdicts = []
            try:
                while len(verdicts) < len(batch):
                    spec = (self.factory, context, batch[len(verdicts) :], timeout_s)
                    verdicts += _judge_in_child(self.server, spec)
            except (ForkServerError, OSError) as error:
                num_left = len(batch) - len(verdicts)
                verdicts += [Verdict(None, "no_judge", str(error))] * num_left
            return verdicts

        with ThreadPoolExecutor(children) as threads:
            return list(chain.from_iterable(threads.map(judge_batch, batches)))


def _judge_in_child(server: ForkServer, spec: Spec) -> list[Verdict]:
    """Returns verdicts on all items, or up to the first that ends the child.

    Raises ForkServerError if the child made no judge.
    """
    factory, _, items, timeout_s = spec
    temporary = tempfile.TemporaryDirectory(prefix="megarl-judge-", ignore_cleanup_errors=True)
    reader, writer = os.pipe()
    with temporary as folder, open(reader, "rb", 0):
        with open(writer, "wb", 0):
            child = server.start("megarl.jail.judging:serve", (spec, folder), [writer])
        lines, status, is_late = _read_lines(child, reader, timeout_s)
    if lines[:1] != [READY]:
        detail = "too late" if is_late else f"exit status {status}"
        if lines:
            detail = lines[0]
        raise ForkServerError(f"the judge {factory} did not start: {detail}")
    verdicts = [_parse(line) for line in lines[1 : len(items) + 1]]
    if len(verdicts) < len(items):
        cause = "timeout" if is_late else KINDS.get(-status, "crashed")
        detail = f"its judge ended with status {status}"
        if cause == "timeout":
            detail += f" of {timeout_s:g} CPU seconds"
        verdicts.append(Verdict(0.0, cause, detail))
    return verdicts


def _read_lines(child: Child, reader: int, timeout_s: float) -> tuple[list[str], int, bool]:
    """Returns the child's lines, its exit status, and whether it was killed for a late line."""
    poll = select.poll()
    written = bytearray()
    deadline = time.monotonic() + START_S
    is_late = True
    poll.register(reader, select.POLLIN)
    while poll.poll(max(deadline - time.monotonic(), 0) * 1000):
        data = os.read(reader, 1 << 16)
        if not data:
            is_late = False
            break
        written += data
        if b"\n" in data:
            deadline = time.monotonic() + timeout_s + BUSY_S
    status = child.kill() if is_late else child.wait(START_S)
    *lines, _ = written.decode("utf-8", "replace").split("\n")
    return lines, status, is_late


def _parse(line: str) -> Verdict:
    value, cause, detail = (*line.split(" ", 2), "", "")[:3]
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        return Verdict(0.0, "raised", f"returned {value}")
    return Verdict(number, cause, detail)


# --- the child ------------------------------------------------------------------------------------


def serve(job: tuple[Spec, str], out: int) -> None:
    """Writes a line when the judge is ready, then one per item."""
    (factory, context, items, timeout_s), folder = job
    # some modules are imported late
    packages = [path for path in sys.path if path.endswith("-packages")]
    rights = {
        "memory_bytes": MEMORY_BYTES,
        "cpu_s": math.ceil(timeout_s * len(items)) + 1,
        "disk_bytes": DISK_BYTES,
        "folder": folder,
        "readable": [sys.base_prefix, *packages, *SYSTEM],
    }
    try:
        judge = resolve_name(factory)(context)
        drop_rights(rights)
    except Exception as error:  # noqa: BLE001 (reported to the caller)
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
    os.write(out, (line.replace("\n", " ") + "\n").encode("utf-8", "replace"))
