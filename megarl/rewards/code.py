"""The `code` reward: runs the response's program on the problem's tests, each program in a jail.

    response --last fenced block--> source --stdin--> jail --what it prints--> compared here
                                           --calls--> solution's jail --results--> compared here
                (JSON), or in the tests' jail (Python), which reports a verdict per test

The solution never shares a process with an expected result or with the code that compares results.
A program that fails scores 0 (or the share of tests it passed). Its first failure is counted as
reward/code/<kind>, where the kinds are those of jail/sandbox.py, `wrong_answer` and `no_code`.
Failures that are not the program's fault drop the sample: `sandbox`, `bad_tests`, `unjudgeable`
(the program could decide its own verdict), `not_run` (no time was left to start it).
"""

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from megarl.config.schema import Reward, Section
from megarl.data.thoughts import after_thoughts
from megarl.jail.code_tests import CallTest, ProblemTests, read_tests
from megarl.jail.influence import UnreadableTests
from megarl.jail.python_tests import Script
from megarl.jail.sandbox import (
    START_S,
    TESTS_OUTPUT_BYTES,
    Ended,
    JailedProcess,
    Limits,
    Solution,
    Tests,
    missing_limits,
)
from megarl.jail.values import encode
from megarl.rewards.interface import (
    BatchReward,
    Score,
    ScoreError,
    ScoreRequest,
    parse_options,
    try_score,
)

log = logging.getLogger(__name__)
# a fenced block of CommonMark; a fence that is never closed extends to the end of the text
FENCED = re.compile(
    r"^(?P<indent>[ \t]*)(?P<fence>(?P<mark>[`~])(?P=mark){2,})[ \t]*(?P<info>[^`\n]*)\n"
    r"(?P<code>.*?)(?:^[ \t]*(?P=fence)(?P=mark)*[ \t]*$|\Z)",
    re.MULTILINE | re.DOTALL,
)
# a fence's info string: Python, or no language
PYTHON = r"(?ia)\{?\.?(python|py)[\d.]*\b.*"
NONE = r"\s*"
NOT_ITS_FAULT = ("sandbox", "bad_tests", "unjudgeable")


class CodeOptions(Section):
    tests: str = "tests"  # the problem's field with the tests; without it, the answer is used
    credit: Literal["all", "fraction"] = "all"  # fraction: run all tests and score the share passed
    sandbox: Literal["strict", "best_effort"] = "strict"
    time_s: PositiveFloat = 4.0  # wall-clock limit for one test
    memory_mb: PositiveInt = 512
    disk_mb: PositiveInt = 16
    output_kb: PositiveInt = 1024
    concurrency: PositiveInt = 8  # samples run in parallel
    total_s: PositiveFloat = 600.0  # limit for all samples of a step together


def make_code(reward: Reward) -> BatchReward:
    """Returns the `code` reward.

    Raises ValueError if an option is wrong, if a program cannot run in the jail, or if `sandbox` is
    strict and this machine cannot enforce a limit.
    """
    options = parse_options(CodeOptions, reward)
    is_strict = options.sandbox == "strict"
    missing = missing_limits()
    if missing:
        problem = (
            "rewards: name='code' runs generated code, but this machine cannot enforce limits: "
            f"{', '.join(map(': '.join, missing.items()))}"
        )
        if "all" in missing:
            raise ValueError(f"{problem}; check the limits of its processes (ulimit -a)")
        if is_strict:
            raise ValueError(
                f"{problem}; use Linux >= 5.13 with Landlock and seccomp (in a container: allow "
                "landlock_create_ruleset), or set options.sandbox: best_effort if nothing else "
                "runs on the machine"
            )
        log.warning(problem)
    limits = Limits(
        time_s=options.time_s,
        memory_bytes=options.memory_mb << 20,
        disk_bytes=options.disk_mb << 20,
        output_bytes=options.output_kb << 10,
        strict=is_strict,
    )
    # plus time for samples that are still running at total_s
    total_s = options.total_s + START_S + options.time_s + 10.0
    code = _Code(options, limits)
    return BatchReward(reward.name, reward.weight, code, total_s, code.read_tests)


def extract_code(response: str) -> str:
    """Returns the last block fenced as Python, or without a language, after any thoughts.

    Returns the whole text if nothing is fenced, and "" if there is no code or the thoughts never
    end.
    """
    text = after_thoughts(response) or ""
    blocks = [*FENCED.finditer(text)]
    if not blocks:
        return text.strip("\n `")
    for language in (PYTHON, NONE):
        for block in reversed(blocks):
            if re.fullmatch(language, block["info"]):
                return re.sub(rf"^{block['indent']}", "", block["code"], flags=re.MULTILINE)
    return ""


TestResult = tuple[str, str]  # (kind of failure, "" if the test passed; detail)


@dataclass(frozen=True)
class _Code:
    options: CodeOptions
    limits: Limits

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        deadline = time.monotonic() + self.options.total_s
        with ThreadPoolExecutor(self.options.concurrency, thread_name_prefix="code") as pool:
            return list(pool.map(partial(try_score, self._score), requests, repeat(deadline)))

    def read_tests(self, answer: Any, extra: Mapping[str, Any]) -> ProblemTests:
        """Returns the tests of a problem.

        Raises ScoreError if they cannot be read, or if the solution could decide their verdict.
        """
        field = self.options.tests
        try:
            return read_tests(
                extra.get(field, answer), extra.get("fn_name") or extra.get("entry_point")
            )
        except UnreadableTests as error:
            raise ScoreError(
                "unjudgeable", f"the solution would judge itself ({field}): {error}"
            ) from None
        except ValueError as error:
            remedy = ""
            if field not in extra:
                remedy = f"; set options.tests to their column, of: {', '.join(extra)}"
            raise ScoreError(
                "bad_tests", f"cannot read the problem's tests ({field}): {error}{remedy}"
            ) from None

    def _score(self, request: ScoreRequest, deadline: float) -> Score:
        tests = self.read_tests(request.answer, request.extra)
        source = extract_code(request.opening + request.response)
        if not source.strip():
            return Score(0.0, "no_code", "found no code in the response")
        if time.monotonic() >= deadline:
            raise ScoreError(
                "not_run", f"ran out of total_s={self.options.total_s} before this sample"
            )
        # A sample that has started keeps its full time; otherwise one could get itself dropped by
        # using up the time.
        sample_deadline = max(deadline, time.monotonic() + START_S + self.limits.time_s)
        passed = 0
        failure = ""
        detail = ""
        for kind, reason in _SampleRun(source, self.limits, sample_deadline).results(tests):
            if not kind:
                passed += 1
                continue
            if not failure:
                failure = kind
                detail = reason
            if self.options.credit == "all":
                break
        if failure in NOT_ITS_FAULT:
            raise ScoreError(failure, detail)
        value = float(passed == len(tests))
        if self.options.credit == "fraction":
            value = passed / len(tests)
        summary = f"passed {passed} of {len(tests)} tests; the first failure was {failure}"
        if detail:
            summary += f" ({detail})"
        return Score(value, failure, summary)


@dataclass(frozen=True)
class _SampleRun:
    source: str
    limits: Limits
    deadline: float

    def results(self, tests: ProblemTests) -> Iterator[TestResult]:
        """Yields one result per test, in order. Closing the iterator ends the processes."""
        for test in tests.pairs:
            if isinstance(test, CallTest):
                continue
            # adds twice the expected output, so that a correct output never exceeds the limit
            limits = self._limits(2 * len(test.stdout))
            program = JailedProcess(self.source, limits, stdin=test.stdin, deadline=self.deadline)
            run = program.run()
            kind = run.kind
            if not kind and not test.is_passed(run.output):
                kind = "wrong_answer"
            yield kind, run.detail
        calls = [test for test in tests.pairs if isinstance(test, CallTest)]
        if calls:
            yield from _until_the_end(len(calls), self._calls(calls))
        if tests.script:
            yield from _until_the_end(len(tests.script.tests), self._script(tests.script))

    def _calls(self, tests: Sequence[CallTest]) -> Iterator[TestResult]:
        # twice the longest expected output, as for programs
        size = 2 * max(len(ascii(test.expected)) for test in tests)
        with closing(self._solution(len(tests), size)) as solution:
            solution.load()
            for test in tests:
                arguments = [*map(encode, test.arguments)]
                reply = solution.call(
                    {"do": "call", "target": test.name, "arguments": arguments}, self._turn()
                )
                if "value" not in reply:
                    yield reply["kind"], reply["text"]
                elif test.is_passed(reply["value"]):
                    yield "", ""
                else:
                    yield "wrong_answer", ""

    def _script(self, script: Script) -> Iterator[TestResult]:
        turns = 1 + len(script.tests)
        limits = self._limits(TESTS_OUTPUT_BYTES)
        tests = Tests("", limits, deadline=self.deadline, num_turns=turns)
        # twice the longest text of a test
        size = 2 * max(map(len, (script.prologue, *script.tests)))
        with closing(tests), closing(self._solution(len(script.tests), size)) as solution:
            try:  # failures before the solution is loaded are not its fault
                until = min(time.monotonic() + START_S, self.deadline)
                tests.prepare(script.names, script.errors, until)
                kind, detail = tests.run(script.prologue, None, until)
            except Ended as ended:
                kind, detail = ended.args
            if kind:
                cause = "sandbox" if kind == "sandbox" else "bad_tests"
                raise ScoreError(cause, f"before any test: {kind} {detail}")
            solution.load()
            for text in script.tests:
                yield tests.run(text, solution, self._turn())

    def _solution(self, num_tests: int, more_bytes: int) -> Solution:
        return Solution(
            self.source, self._limits(more_bytes), deadline=self.deadline, num_turns=1 + num_tests
        )

    def _limits(self, more_bytes: int) -> Limits:
        return replace(self.limits, output_bytes=self.limits.output_bytes + more_bytes)

    def _turn(self) -> float:
        return min(time.monotonic() + self.limits.time_s, self.deadline)


def _until_the_end(num_tests: int, results: Iterator[TestResult]) -> Iterator[TestResult]:
    """Yields `results`; if a process ends early, yields its end as the result of each test left."""
    done = 0
    try:
        for result in results:
            done += 1
            yield result
    except Ended as ended:
        yield from [ended.args] * (num_tests - done)
