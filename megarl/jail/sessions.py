"""Calls the solution and runs the tests, each in its own jail; passes plain values between them.

    tests' jail --{"ask": call}--> checked here --call--> solution's jail
                <----value-------- checked here <--value--      verdict: a report of the tests' jail

The solution has no pipe to the tests' jail, and what it sends is passed on only as values.py
describes it.
"""

import json
import os
import select
import time
from collections.abc import Sequence
from dataclasses import replace

from megarl.jail.sandbox import JailedProcess, Limits, known_kind
from megarl.jail.values import JailMessage, failure, is_encoded

TESTS_OUTPUT_BYTES = 64 << 20  # arguments of one call, which trusted tests send


class Ended(Exception):
    """The process exceeded a limit, or ended: (kind of failure, detail)."""


class Session:
    """A jailed process that answers requests one by one. It must be closed.

    Its methods raise Ended if the process ends before.
    """

    mode: str  # of jailed.run

    def __init__(self, source: str, limits: Limits, *, num_tests: int, deadline: float) -> None:
        self._reader, self._requests = os.pipe()
        os.set_blocking(self._requests, False)
        self._process = JailedProcess(
            source, limits, self.mode, requests=self._reader, num_turns=1 + num_tests
        )
        self._steps = self._process.steps(deadline)

    def close(self) -> None:
        self._steps.close()
        os.close(self._requests)
        os.close(self._reader)

    def start(self) -> None:
        """Returns when the limits are set, and the code is about to run."""
        while self._process.missing is None:
            self._step()

    def receive(self, until: float) -> JailMessage:
        """Returns the next report, which is untrusted. The process is killed at `until`."""
        process = self._process
        process.turn_deadline = until
        process.report_bytes = 0
        while not process.reports:
            self._step()
        return process.reports.popleft()

    def ask(self, request: JailMessage, until: float) -> JailMessage:
        """Sends a request and returns the reply."""
        if self._process.reports:
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
                break  # `receive` finds out why
        return self.receive(until)

    def _step(self) -> None:
        if next(self._steps, "ended"):
            run = self._process.ended
            raise Ended(run.kind or "exited", run.detail)


class Solution(Session):
    """A solution that is called."""

    mode = "solution"

    def load(self) -> None:
        self.start()
        until = self._process.turn_deadline
        while "loaded" not in self.receive(until):  # it reports how loading failed, and ends
            pass

    def call(self, operation: JailMessage, until: float) -> JailMessage:
        """Applies an operation (untrusted.execute).

        Returns {"value", "arguments"?} or {"raised", "text", "kind"}.
        """
        reply = self.ask(operation, until)
        names = reply.get("raised")
        text = reply.get("text")
        if isinstance(names, list) and all(isinstance(word, str) for word in (*names, text)):
            return {"raised": names, "text": text, "kind": known_kind(reply.get("kind"))}
        if "value" not in reply or not is_encoded(reply["value"]):
            return failure("ValueError", "the reply is not a value")
        result = {"value": reply["value"]}
        changed = reply.get("arguments")
        if operation.get("in_place") and isinstance(changed, list) and is_encoded(changed):
            result["arguments"] = changed
        return result


class Tests(Session):
    """The tests of a problem."""

    mode = "tests"

    def __init__(self, limits: Limits, *, num_tests: int, deadline: float) -> None:
        limits = replace(limits, output_bytes=limits.output_bytes + TESTS_OUTPUT_BYTES)
        super().__init__("", limits, num_tests=num_tests, deadline=deadline)

    def prepare(self, names: Sequence[str], errors: Sequence[str], until: float) -> None:
        """`names` are the solution's; `errors` are classes of exceptions that it should raise."""
        self.start()
        self.ask({"names": names, "errors": errors}, until)

    def run(self, text: str, solution: Solution | None, until: float) -> tuple[str, str]:
        """Executes statements. Returns the kind of their failure, empty if none, and a reason."""
        report = self.ask({"run": text}, until)
        while "ask" in report:
            assert solution is not None, "only statements without its names can run without it"
            report = self.ask(solution.call(report["ask"], until), until)
        return report["verdict"], report["why"]
