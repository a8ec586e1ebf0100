"""The `code` reward: runs the response's program on the problem's tests, each program in a jail.

    response --last fenced block--> source --stdin--> jail --what it prints--> compared here
                                           --calls--> solution's jail --results--> compared here (JSON), or in the
                                                      tests' jail (Python), which reports a verdict per test

The solution never shares a process with an expected result or with what decides. A program that fails scores 0 (or the
share of tests it passed), and its first failure is counted as reward/code/<kind>: those of jail/sandbox.py,
`wrong_answer` and `no_code`. Failures that are not its fault drop the sample: `sandbox`, `bad_tests`, `unjudgeable` (it
would decide its own verdict), `not_run` (no time was left to start it).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from megarl.config.schema import Reward, Section
from megarl.jail.sandbox import START_S, Limits, missing_limits, run_program
from megarl.jail.sessions import Ended, Solution, Tests
from megarl.jail.values import encode
from megarl.rewards.code_tests import CallTest, ProblemTests, read_tests
from megarl.rewards.interface import (
    BatchReward,
    Score,
    ScoreError,
    ScoreRequest,
    parse_options,
    try_score,
)
from megarl.rewards.python_tests import Script, Unjudgeable

log = logging.getLogger(__name__)
NOT_ITS_FAULT = ("sandbox", "bad_tests", "unjudgeable")


class CodeOptions(Section):
    tests: str = "tests"  # the problem's field with the tests; its answer if there is no such field
    credit: Literal["all", "fraction"] = "all"  # fraction: run all tests and score the share passed
    sandbox: Literal["strict", "best_effort"] = "strict"
    time_s: PositiveFloat = 4.0  # wall clock of one test
    memory_mb: PositiveInt = 512
    disk_mb: PositiveInt = 16
    output_kb: PositiveInt = 1024
    concurrency: PositiveInt = 8  # samples run in parallel
    total_s: PositiveFloat = 600.0  # of all samples of a step together


def make_code(reward: Reward) -> BatchReward:
    """Raises ValueError if an option is wrong, or `sandbox` is strict and this machine cannot enforce a limit."""
    options = parse_options(CodeOptions, reward)
    if missing := missing_limits():
        reasons = ", ".join(f"{limit}: {reason}" for limit, reason in missing.items())
        problem = f"rewards: name='code' runs generated code, but this machine cannot enforce limits: {reasons}"
        if options.sandbox == "strict":
            raise ValueError(
                f"{problem}; use Linux >= 5.13 with Landlock and seccomp (in a container: allow "
                "landlock_create_ruleset), or set options.sandbox: best_effort if nothing else runs on the machine"
            )
        log.warning(problem)
    limits = Limits(
        time_s=options.time_s,
        memory_bytes=options.memory_mb << 20,
        disk_bytes=options.disk_mb << 20,
        output_bytes=options.output_kb << 10,
        strict=options.sandbox == "strict",
    )
    total_s = (
        options.total_s + START_S + options.time_s + 10.0
    )  # for samples still running when the time is up
    code = _Code(options, limits)
    return BatchReward(reward.name, reward.weight, code, total_s, code.read_tests)


def extract_code(response: str) -> str:
    """The last fenced block after any thinking; the whole text if nothing is fenced. Empty if there is no code."""
    text = response.rpartition("</think>")[2]
    pieces = text.split("```")
    if len(pieces) < 2:
        return text.strip("\n ")
    last = (
        len(pieces) - 2 if len(pieces) % 2 else len(pieces) - 1
    )  # a fence that is never closed counts
    language, newline, code = pieces[last].partition("\n")
    return (
        code
        if newline and language.strip().lower() in ("", "python", "python3", "py")
        else pieces[last]
    )


Result = tuple[str, str]  # of a test: kind of failure, empty if it passed; detail


@dataclass(frozen=True)
class _Code:
    options: CodeOptions
    limits: Limits

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        deadline = time.monotonic() + self.options.total_s
        with ThreadPoolExecutor(self.options.concurrency, thread_name_prefix="code") as pool:
            return list(
                pool.map(lambda request: try_score(self._score, request, deadline), requests)
            )

    def read_tests(self, answer: str | None, extra: Mapping[str, Any]) -> ProblemTests:
        """Raises ScoreError if the tests cannot be read, or their verdict would be the solution's."""
        field, function = self.options.tests, extra.get("fn_name") or extra.get("entry_point")
        try:
            return read_tests(extra.get(field, answer), function)
        except Unjudgeable as error:
            raise ScoreError(
                "unjudgeable", f"the solution would judge itself ({field}): {error}"
            ) from None
        except ValueError as error:
            raise ScoreError(
                "bad_tests", f"cannot read the problem's tests ({field}): {error}"
            ) from None

    def _score(self, request: ScoreRequest, deadline: float) -> Score:
        tests = self.read_tests(request.answer, request.extra)
        source = extract_code(request.response)
        if not source.strip():
            return Score(0.0, "no_code", "found no code in the response")
        if time.monotonic() >= deadline:
            raise ScoreError(
                "not_run", f"ran out of total_s={self.options.total_s} before this sample"
            )
        # a sample that was started has its time, so that none can be left out by using all of it
        run = _SampleRun(
            source, self.limits, max(deadline, time.monotonic() + START_S + self.limits.time_s)
        )
        results: list[Result] = []
        for result in run.results(tests):
            results.append(result)
            if result[0] and self.options.credit == "all":
                break
        failure, detail = next((result for result in results if result[0]), ("", ""))
        if failure in NOT_ITS_FAULT:
            raise ScoreError(failure, detail)
        passed = sum(not kind for kind, _ in results)
        value = (
            passed / len(tests)
            if self.options.credit == "fraction"
            else float(passed == len(tests))
        )
        reason = f" ({detail})" if detail else ""
        return Score(
            value,
            failure,
            f"passed {passed} of {len(tests)} tests; the first failure was {failure}{reason}",
        )


@dataclass(frozen=True)
class _SampleRun:
    source: str
    limits: Limits
    deadline: float

    def results(self, tests: ProblemTests) -> Iterator[Result]:
        """One result per test, in their order; the processes end with the iterator."""
        for test in tests.programs:
            # plus twice the expected output, so that a correct answer is never too long
            limits = replace(
                self.limits, output_bytes=self.limits.output_bytes + 2 * len(test.stdout)
            )
            run = run_program(self.source, test.stdin, limits, deadline=self.deadline)
            yield run.kind or ("" if test.is_passed(run.output) else "wrong_answer"), run.detail
        if tests.calls:
            yield from _until_the_end(len(tests.calls), self._calls(tests.calls))
        if tests.script:
            yield from _until_the_end(len(tests.script.tests), self._script(tests.script))

    def _calls(self, tests: Sequence[CallTest]) -> Iterator[Result]:
        with closing(self._solution(len(tests))) as solution:
            solution.load(self._turn)
            for test in tests:
                arguments = [encode(argument) for argument in test.arguments]
                reply = solution.call(
                    {"do": "call", "target": test.name, "arguments": arguments}, self._turn()
                )
                passed = "value" in reply and test.is_passed(reply["value"])
                yield reply.get("kind") or ("" if passed else "wrong_answer"), reply.get("text", "")

    def _script(self, script: Script) -> Iterator[Result]:
        tests = Tests(self.limits, num_tests=len(script.tests), deadline=self.deadline)
        with closing(tests), closing(self._solution(len(script.tests))) as solution:
            try:  # what fails before the solution is loaded is not its fault
                until = min(time.monotonic() + START_S, self.deadline)
                tests.prepare(script.names, script.errors, until)
                kind, detail = tests.run(script.prologue, None, until)
            except Ended as ended:
                kind, detail = ended.kind, ended.detail
            if kind:
                raise ScoreError(
                    "sandbox" if kind == "sandbox" else "bad_tests",
                    f"before any test: {kind} {detail}",
                )
            solution.load(self._turn)
            for text in script.tests:
                yield tests.run(text, solution, self._turn())

    def _solution(self, num_tests: int) -> Solution:
        return Solution(self.source, self.limits, num_tests=num_tests, deadline=self.deadline)

    def _turn(self) -> float:
        return min(time.monotonic() + self.limits.time_s, self.deadline)


def _until_the_end(num_tests: int, results: Iterator[Result]) -> Iterator[Result]:
    """Yields `results`, and for the tests after a process ended, how it ended."""
    done = 0
    try:
        for result in results:
            done += 1
            yield result
    except Ended as ended:
        yield from [(ended.kind, ended.detail)] * (num_tests - done)
