"""The `code` reward: the response's program is run on the problem's tests, each in a jail.

    response --last fenced block--> source --tests of the problem--> sandbox (a process a program) --> share passed

What the code does wrong is its own fault: the sample is worth 0 (or the share of tests passed) and the kind of the
first failure is counted, as reward/code/timeout; `sandbox` has the kinds, and `wrong_answer` and `no_code` come on
top. What is not its fault leaves the sample out: `sandbox`, `bad_tests`, `not_run` (no time was left), `error`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.config.schema import Reward, Section
from megarl.jail.sandbox import Limits, Run, missing_limits, run_calls, run_program, told
from megarl.rewards.code_tests import CallTest, ProgramTest, read_tests
from megarl.rewards.outcome import Case, Verdict, options_of

__all__ = ["Code", "CodeOptions", "extract_code", "make_code"]

log = logging.getLogger(__name__)


class CodeOptions(Section):
    tests: str = "tests"  # which of the problem's fields holds them; without such a field, its answer
    credit: Literal["all", "fraction"] = "all"  # fraction: the share of tests passed, all of which are run
    sandbox: Literal["strict", "best_effort"] = "strict"
    time_s: PositiveFloat = 4.0  # wall clock of one test
    memory_mb: PositiveInt = 512
    disk_mb: PositiveInt = 16
    output_kb: PositiveInt = 1024
    concurrency: PositiveInt = 8  # samples at once
    total_s: float = Field(default=600.0, gt=0)  # of all samples of a step together


def make_code(reward: Reward) -> Code:
    """Raises ValueError when an option is wrong, or a limit cannot be enforced here and `sandbox` is strict."""
    options = options_of(CodeOptions, reward)
    missing = missing_limits()
    if missing and options.sandbox == "strict":
        raise ValueError(
            f"rewards: name='code' runs generated code, and this machine cannot limit {_list(missing)}; use a Linux "
            "kernel >= 5.13 with Landlock and seccomp (in a container: allow landlock_create_ruleset), or set "
            "options.sandbox: best_effort where nothing else is on the machine"
        )
    if missing:
        log.warning("rewards: name='code' runs generated code that this machine cannot limit: %s", _list(missing))
    limits = Limits(
        time_s=options.time_s,
        memory_bytes=options.memory_mb << 20,
        disk_bytes=options.disk_mb << 20,
        output_bytes=options.output_kb << 10,
        strict=options.sandbox == "strict",
    )
    return Code(options, limits)


def _list(missing: dict[str, str]) -> str:
    return ", ".join(f"{what}: {reason}" for what, reason in missing.items())


def extract_code(response: str) -> str:
    """The last fenced block after the thinking; without a fence, all of it. Empty: there is none."""
    text = response.rpartition("</think>")[2]
    pieces = text.split("```")
    if len(pieces) < 2:
        return text.strip("\n ")
    last = len(pieces) - 2 if len(pieces) % 2 else len(pieces) - 1  # an open fence at the end counts
    language, newline, code = pieces[last].partition("\n")
    return code if newline and language.strip().lower() in ("", "python", "python3", "py") else pieces[last]


@dataclass(frozen=True)
class Code:
    """outcome.Part."""

    options: CodeOptions
    limits: Limits

    @property
    def total_s(self) -> float:
        return self.options.total_s + 30.0  # for what runs when the time is up

    def __call__(self, cases: Sequence[Case]) -> list[Verdict]:
        deadline = time.monotonic() + self.options.total_s
        with ThreadPoolExecutor(self.options.concurrency, thread_name_prefix="code") as pool:
            return list(pool.map(lambda case: self._guarded(case, deadline), cases))

    def _guarded(self, case: Case, deadline: float) -> Verdict:
        try:
            return self._verdict(case, deadline)
        except Exception as error:  # noqa: BLE001 (of the machine: no process, no disk; the run goes on)
            return Verdict(None, "error", f"could not be run: {type(error).__name__}: {error}")

    def _verdict(self, case: Case, deadline: float) -> Verdict:
        source = extract_code(case.response)
        raw = case.extra.get(self.options.tests, case.answer)
        name = case.extra.get("fn_name") or case.extra.get("entry_point")
        try:
            tests = read_tests(raw, name)
        except ValueError as error:
            return Verdict(None, "bad_tests", f"the problem's tests ({self.options.tests}) cannot be read: {error}")
        if not source.strip():
            return Verdict(0.0, "no_code", "the response holds no code")
        kinds = self._kinds(source, tests, deadline)
        first = next((kind for kind in kinds if kind), "")
        if first.partition(":")[0] in ("sandbox", "not_run"):
            cause, _, why = first.partition(":")
            return Verdict(None, cause, why or f"not all tests ran within total_s={self.options.total_s}")
        passed = sum(not kind for kind in kinds)
        value = passed / len(tests) if self.options.credit == "fraction" else float(passed == len(tests))
        return Verdict(value, first, f"of {len(tests)} tests {passed} passed; the first failure was {first}")

    def _kinds(self, source: str, tests: Sequence[ProgramTest | CallTest], deadline: float) -> list[str]:
        """How each test failed, empty where it passed; up to the first failure unless credit is by fraction."""
        kinds: list[str] = []
        programs = [test for test in tests if isinstance(test, ProgramTest)]
        calls = [test for test in tests if isinstance(test, CallTest)]
        for test in programs:
            if kinds and kinds[-1] and self.options.credit == "all":
                return kinds
            if time.monotonic() >= deadline:
                return [*kinds, "not_run"]
            run = run_program(source, test.stdin, self._room_for(test), deadline=deadline)
            kinds.append(_kind(run, deadline) or ("" if test.right(run.output) else "wrong_answer"))
        if calls:
            requests = [request for test in calls for request in test.requests]
            run = run_calls(source, requests, self.limits, deadline=deadline)
            kinds += _call_kinds(run, calls, deadline)
        return kinds

    def _room_for(self, test: ProgramTest) -> Limits:
        """A right answer is never too long."""
        return replace(self.limits, output_bytes=self.limits.output_bytes + 2 * len(test.stdout))


def _kind(run: Run, deadline: float) -> str:
    if run.kind == "sandbox":
        return "not_run" if time.monotonic() >= deadline else f"sandbox:{run.why}"
    return run.kind


def _call_kinds(run: Run, tests: Sequence[CallTest], deadline: float) -> list[str]:
    kinds, at = [], 0
    for test in tests:
        replies = run.replies[at : at + len(test.requests)]
        at += len(test.requests)
        failed = next((told(reply.get("error")) for reply in replies if "value" not in reply), "")
        if failed:
            kinds.append(failed)
        elif len(replies) < len(test.requests):
            kinds.append(_kind(run, deadline) or "exited")
        else:
            kinds.append("" if test.right([_value(reply["value"]) for reply in replies]) else "wrong_answer")
    return kinds


def _value(tagged: Any) -> Any:
    """What `jail.plain` made plain. Raises nothing: what it cannot read equals nothing."""
    if not isinstance(tagged, dict) or len(tagged) != 1:
        return tagged
    ((kind, inside),) = tagged.items()
    try:
        if kind == "int":
            return int(inside, 16)
        if kind == "dict":
            return {_value(key): _value(item) for key, item in inside}
        items = [_value(item) for item in inside]
        return {"tuple": tuple, "list": list, "set": set}[kind](items)
    except (TypeError, ValueError, KeyError, RecursionError):
        return object()
