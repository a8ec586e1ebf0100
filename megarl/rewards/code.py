"""The `code` reward: runs the response's program on the problem's tests, each program in a jail.

    response --last fenced block--> source --tests of the problem--> sandbox (one process per program) --> share passed

A program that fails scores 0 (or the share of tests it passed), and the kind of its first failure is counted, for
example reward/code/timeout: the kinds of jail/sandbox.py, `wrong_answer` and `no_code`. Failures that are not the
program's fault drop the sample: `sandbox`, `bad_tests`, `not_run` (no time was left), `error`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.config.schema import Reward, Section
from megarl.jail.sandbox import Limits, Run, missing_limits, run_calls, run_program
from megarl.rewards.code_tests import CallTest, ProgramTest, read_tests
from megarl.rewards.interface import BatchReward, Score, ScoreError, ScoreRequest, parse_options, try_score

log = logging.getLogger(__name__)


class CodeOptions(Section):
    tests: str = "tests"  # the problem's field with the tests; its answer if there is no such field
    credit: Literal["all", "fraction"] = "all"  # fraction: run all tests and score the share passed
    sandbox: Literal["strict", "best_effort"] = "strict"
    time_s: PositiveFloat = 4.0  # wall clock of one test
    memory_mb: PositiveInt = 512
    disk_mb: PositiveInt = 16
    output_kb: PositiveInt = 1024
    concurrency: PositiveInt = 8  # samples run in parallel
    total_s: float = Field(default=600.0, gt=0)  # of all samples of a step together


def make_code(reward: Reward) -> BatchReward:
    """Raises ValueError if an option is wrong, or `sandbox` is strict and this machine cannot enforce a limit."""
    options = parse_options(CodeOptions, reward)
    missing = missing_limits()
    reasons = ", ".join(f"{limit}: {reason}" for limit, reason in missing.items())
    if missing and options.sandbox == "strict":
        raise ValueError(
            f"rewards: name='code' runs generated code, but this machine cannot enforce limits: {reasons}; use Linux "
            ">= 5.13 with Landlock and seccomp (in a container: allow landlock_create_ruleset), or set "
            "options.sandbox: best_effort if nothing else runs on the machine"
        )
    if missing:
        log.warning("rewards: name='code' runs generated code, but this machine cannot enforce limits: %s", reasons)
    limits = Limits(
        time_s=options.time_s,
        memory_bytes=options.memory_mb << 20,
        disk_bytes=options.disk_mb << 20,
        output_bytes=options.output_kb << 10,
        strict=options.sandbox == "strict",
    )
    total_s = options.total_s + 30.0  # for programs still running when the time is up
    return BatchReward(reward.name, reward.weight, _Code(options, limits), total_s)


def extract_code(response: str) -> str:
    """The last fenced block after any thinking; the whole text if nothing is fenced. Empty if there is no code."""
    text = response.rpartition("</think>")[2]
    pieces = text.split("```")
    if len(pieces) < 2:
        return text.strip("\n ")
    last = len(pieces) - 2 if len(pieces) % 2 else len(pieces) - 1  # a fence that is never closed counts
    language, newline, code = pieces[last].partition("\n")
    return code if newline and language.strip().lower() in ("", "python", "python3", "py") else pieces[last]


class _TestResult(NamedTuple):
    failure: str = ""  # its kind; empty: the test passed
    detail: str = ""


@dataclass(frozen=True)
class _Code:
    options: CodeOptions
    limits: Limits

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        deadline = time.monotonic() + self.options.total_s
        with ThreadPoolExecutor(self.options.concurrency, thread_name_prefix="code") as pool:
            return list(pool.map(lambda request: try_score(self._score, request, deadline), requests))

    def _score(self, request: ScoreRequest, deadline: float) -> Score:
        field, function = self.options.tests, request.extra.get("fn_name") or request.extra.get("entry_point")
        try:
            tests = read_tests(request.extra.get(field, request.answer), function)
        except ValueError as error:
            raise ScoreError("bad_tests", f"cannot read the problem's tests ({field}): {error}") from None
        source = extract_code(request.response)
        if not source.strip():
            return Score(0.0, "no_code", "found no code in the response")
        results = self._run_tests(source, tests, deadline)
        failure, detail = next((result for result in results if result.failure), _TestResult())
        if failure in ("sandbox", "not_run"):
            raise ScoreError(failure, detail or f"ran out of total_s={self.options.total_s} before all tests")
        passed = sum(not result.failure for result in results)
        value = passed / len(tests) if self.options.credit == "fraction" else float(passed == len(tests))
        return Score(value, failure, f"passed {passed} of {len(tests)} tests; the first failure was {failure}")

    def _run_tests(self, source: str, tests: Sequence[ProgramTest | CallTest], deadline: float) -> list[_TestResult]:
        """One result per test, up to the first failure unless credit is "fraction"."""
        results: list[_TestResult] = []
        for test in tests:
            if not isinstance(test, ProgramTest):
                continue
            if results and results[-1].failure and self.options.credit == "all":
                return results
            if time.monotonic() >= deadline:
                return [*results, _TestResult("not_run")]
            # plus twice the expected output, so that a correct answer is never too long
            limits = replace(self.limits, output_bytes=self.limits.output_bytes + 2 * len(test.stdout))
            run = run_program(source, test.stdin, limits, deadline=deadline)
            results.append(_run_result(run, test.is_passed(run.output), deadline))
        if calls := [test for test in tests if isinstance(test, CallTest)]:
            requests = [request for test in calls for request in test.requests]
            results += _call_results(run_calls(source, requests, self.limits, deadline=deadline), calls, deadline)
        return results


def _run_result(run: Run, passed: bool, deadline: float) -> _TestResult:
    if run.kind == "sandbox":
        return _TestResult("not_run") if time.monotonic() >= deadline else _TestResult("sandbox", run.detail)
    return _TestResult(run.kind or ("" if passed else "wrong_answer"))


def _call_results(run: Run, tests: Sequence[CallTest], deadline: float) -> list[_TestResult]:
    test_results, start = [], 0
    for test in tests:
        results = run.results[start : start + len(test.requests)]
        start += len(test.requests)
        if error := next((result.error for result in results if result.error), ""):
            test_results.append(_TestResult(error))
        elif len(results) < len(test.requests):
            result = _run_result(run, True, deadline)
            test_results.append(result if result.failure else _TestResult("exited"))
        else:
            passed = test.is_passed([result.value for result in results])
            test_results.append(_TestResult("" if passed else "wrong_answer"))
    return test_results
