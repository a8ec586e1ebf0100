"""Runs trusted judges on untrusted texts, in forked processes that have dropped their rights.

    items --batches--> child of a fork server: judge = factory(context); drop_rights()
                                               --a report per item--> Verdicts

If a text makes its judge raise an error, hang or run out of memory, its value is 0; if the child
ends, a new child judges the texts after it. If a judge cannot start, which is not the text's fault,
the verdict has no value.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from megarl.jail.fork_server import ForkServer, ForkServerError
from megarl.jail.jailed import drop_rights
from megarl.jail.sandbox import Ended, JailedProcess, Limits
from megarl.jail.untrusted import write
from megarl.jail.values import JailMessage

# fewest and most texts per child
MIN_BATCH = 16
MAX_BATCH = 128
MAX_CHILDREN = 4
START_S = 60.0  # time for a child to make its judge
BUSY_S = 20.0  # wall-clock time beyond the CPU limit that a child may wait for a processor
MEMORY_BYTES = 2 << 30
DISK_BYTES = 1 << 20

Item = tuple[Any, ...]


@dataclass(frozen=True)
class Verdict:
    """The result of judging a text.

    `value` is None if the text could not be judged for a reason other than the text.
    """

    value: float | None
    cause: str = ""  # one word
    detail: str = ""  # a sentence


class JudgePool:
    """Runs judges in forked children. ``factory(context)`` returns a judge.

    `factory` is "module:function"; `modules` are preloaded. ``judge(*item)`` returns a float or a
    Verdict with a value.
    """

    def __init__(self, factory: str, *modules: str) -> None:
        self.factory = factory
        path = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        self.server = ForkServer([*modules, factory.partition(":")[0]], path)

    def judge(self, context: Any, items: Sequence[Item], *, timeout_s: float) -> list[Verdict]:
        """Returns one verdict per item, in order; `timeout_s` limits the CPU seconds per item."""
        children = min(MAX_CHILDREN, os.cpu_count() or 1)
        size = min(max(math.ceil(len(items) / children), MIN_BATCH), MAX_BATCH)
        batches = [items[start : start + size] for start in range(0, len(items), size)]

        def judge_batch(batch: Sequence[Item]) -> list[Verdict]:
            verdicts = []
            try:
                while len(verdicts) < len(batch):
                    verdicts += self._judge_in_child(context, batch[len(verdicts) :], timeout_s)
            except (ForkServerError, OSError) as error:
                num_left = len(batch) - len(verdicts)
                verdicts += [Verdict(None, "no_judge", str(error))] * num_left
            return verdicts

        with ThreadPoolExecutor(children) as threads:
            return list(chain.from_iterable(threads.map(judge_batch, batches)))

    def _judge_in_child(
        self, context: Any, items: Sequence[Item], timeout_s: float
    ) -> list[Verdict]:
        """Returns verdicts on all items, or up to and including the first that ends the child.

        Raises ForkServerError if the child could not make its judge.
        """
        turn_s = timeout_s + BUSY_S
        process = JailedProcess(
            (self.factory, context, items, timeout_s),
            Limits(turn_s, memory_bytes=MEMORY_BYTES, disk_bytes=DISK_BYTES),
            num_turns=len(items),
            start_s=START_S,
            server=self.server,
            target=f"{__name__}:serve",
        )
        verdicts = []
        try:
            with closing(process):
                process.start()
                for _ in items:
                    verdicts.append(_parse(process.receive(time.monotonic() + turn_s)))
        except Ended:
            run = process.ended
            if run.kind == "sandbox":
                raise ForkServerError(
                    f"the judge {self.factory} did not start: {run.detail}"
                ) from None
            detail = f"its judge ended with status {process.status}"
            if run.kind == "timeout":
                detail += f" of {timeout_s:g} CPU seconds"
            verdicts.append(Verdict(0.0, run.kind or "crashed", detail))
        return verdicts


def _parse(report: JailMessage) -> Verdict:
    match report.get("verdict"):  # untrusted: the text may have written it
        case [float(value), str(cause), str(detail)] if math.isfinite(value):
            return Verdict(value, cause, detail.replace("\n", " "))
    return Verdict(0.0, "raised", f"returned {report}"[:200])


# --- the child ------------------------------------------------------------------------------------


def serve(spec: JailMessage, _stdin: int, _stdout: int, report: int) -> None:
    """Reports that the judge is ready, then a verdict on each item; runs in the child."""
    factory, context, items, timeout_s = spec["source"]
    # the judge may import some modules later
    spec["readable"] += [path for path in sys.path if path.endswith("-packages")]
    try:
        judge = resolve_name(factory)(context)
        drop_rights(spec)
    except Exception as error:  # noqa: BLE001 (reported to the caller)
        write(report, {"missing": {"judge": f"{type(error).__name__}: {error}"}})
        return
    write(report, {"missing": {}})
    for item in items:
        signal.setitimer(signal.ITIMER_PROF, timeout_s)  # SIGPROF after this CPU time; fatal
        write(report, {"verdict": _verdict(judge, item)})


def _verdict(judge: Any, item: Item) -> tuple[float, str, str]:
    try:
        result = judge(*item)
        if isinstance(result, Verdict):
            return float(result.value or 0), result.cause, result.detail
        return float(result), "", ""
    except MemoryError:
        return 0.0, "memory", "the judge ran out of memory"
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the text caused it)
        reason = ""
        with suppress(Exception):
            reason = str(error)[:200]
        return 0.0, "raised", f"its judge raised {type(error).__name__}: {reason}"
