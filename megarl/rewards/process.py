"""The `process` reward: the response is split into steps, each step gets a score, at the token that completes it.

    text --splitter--> steps (joined, they are the text) --scorer--> a number each --token ends--> Sample.step_rewards

    rewards: [{name: process, options: {splitter: paragraph, scorer: "my_package.steps:score"}},
              {name: accuracy, weight: 1.0}]          # an outcome reward beside it stays Sample.reward
    algorithm: {advantage: grpo_process}

The scorer is a function ``f(prompt, steps, answer, ...) -> one float a step`` or a URL (remote.py). `weight` multiplies
each step's reward; the sum of the outcome rewards does not contain them (without any, Sample.reward is the weighted
mean of the steps, and only shown). One step without a finite score leaves the sample out. Two steps that end inside
one token share it: their rewards add up there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megarl.config.schema import Reward, Section
from megarl.data.user_code import import_function
from megarl.rewards.functions import Rule
from megarl.rewards.limits import TooSlow, limited
from megarl.rewards.outcome import Case, Verdict, options_of
from megarl.rewards.remote import GRACE_S, Failed, Http, ask, http_of, number, read_entry, sample_row

__all__ = ["Process", "ProcessOptions", "make_process", "split_steps", "token_ends"]

Decode = Callable[[Sequence[int]], str]

SPLITTERS = {  # what ends a step, and belongs to it
    "paragraph": r"\n[ \t]*\n\s*",
    "newline": r"\n\s*",
    "sentence": r"[.!?]+[\"')\]]*\s+|[\u3002\uff01\uff1f]+\s*|\n\s*",
}


class ProcessOptions(Section):
    scorer: str
    splitter: Literal["paragraph", "newline", "sentence", "regex"] = "paragraph"
    pattern: str = ""  # with splitter: regex; what ends a step
    options: dict[str, Any] = Field(default_factory=dict)  # the scorer's, where it is a function
    function_s: PositiveFloat = 10.0  # of one sample, where it is a function
    timeout_s: PositiveFloat = 30.0  # these as in remote.py, where it is a URL
    total_s: PositiveFloat = 300.0
    retries: NonNegativeInt = 3
    backoff_s: PositiveFloat = 0.5
    concurrency: PositiveInt = 16
    batch_size: PositiveInt = 32
    headers_env: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> ProcessOptions:
        if (self.splitter == "regex") != bool(self.pattern):
            raise ValueError(f"splitter={self.splitter!r} with pattern={self.pattern!r}; a pattern goes with regex")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern={self.pattern!r} is no regular expression: {error}") from None
        return self


def make_process(reward: Reward, decode: Decode) -> Process:
    """`decode` makes text of the response's tokens, as the response was made. Raises ValueError for a wrong option."""
    options = options_of(ProcessOptions, reward)
    if "://" in options.scorer:
        return Process(options, decode, http=http_of(options.scorer, reward.name, options))
    function = import_function(options.scorer, setting="rewards: name='process', scorer")
    return Process(options, decode, rule=Rule.of(function, options.options, name=f"process, scorer {options.scorer}"))


@dataclass(frozen=True)
class Process:
    """outcome.Part; `rule` or `http` scores the steps."""

    options: ProcessOptions
    decode: Decode
    rule: Rule | None = None
    http: Http | None = None

    @property
    def is_local(self) -> bool:
        """Its scorer is called where the rules are."""
        return self.rule is not None

    @property
    def total_s(self) -> float:
        return self.options.total_s + GRACE_S

    def __call__(self, cases: Sequence[Case]) -> list[Verdict]:
        split = [self._split(case) for case in cases]
        if self.http is None:
            return [self._guarded(case, steps, self._called) for case, steps in zip(cases, split, strict=True)]
        pairs = zip(cases, split, strict=True)
        rows = [sample_row(case) | {"steps": steps} for case, steps in pairs if isinstance(steps, list) and steps]
        entries = ask(self.http, rows, self.options.batch_size)
        url = self.http.url
        return [
            self._guarded(case, steps, lambda case, steps: read_entry(entries[case.id], url).get("steps"))
            for case, steps in zip(cases, split, strict=True)
        ]

    def _split(self, case: Case) -> list[str] | Failed:
        pattern = self.options.pattern or SPLITTERS[self.options.splitter]
        try:
            return limited(split_steps, {"text": case.response, "pattern": pattern}, timeout_s=self.options.function_s)
        except TooSlow:
            return Failed("timeout", f"splitting by {pattern!r} took longer than {self.options.function_s} s")

    def _called(self, case: Case, steps: list[str]) -> Any:
        assert self.rule is not None
        arguments = self.rule.arguments(case, steps=steps)
        try:
            return limited(self.rule.function, arguments, timeout_s=self.options.function_s)
        except TooSlow:
            raise Failed("timeout", f"the scorer took longer than function_s={self.options.function_s}") from None

    def _guarded(self, case: Case, steps: list[str] | Failed, score: Callable[[Case, list[str]], Any]) -> Verdict:
        try:
            if isinstance(steps, Failed):
                raise steps
            scores = score(case, steps) if steps else []
            return self._placed(case, steps, scores)
        except Failed as failed:
            return failed.verdict
        except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code may fail in any way)
            return Verdict(None, "error", f"raised {type(error).__name__}: {error}")

    def _placed(self, case: Case, steps: list[str], scores: Any) -> Verdict:
        scores = scores.tolist() if hasattr(scores, "tolist") else scores
        if not isinstance(scores, list | tuple) or len(scores) != len(steps):
            given = f"{len(scores)} scores" if isinstance(scores, list | tuple) else f"a {type(scores).__name__}"
            raise Failed("bad_answer", f"{self.options.scorer} gave {given} for {len(steps)} steps")
        values = [number(score, self.options.scorer) for score in scores]
        ends = token_ends(self.decode, case.tokens, steps)
        if ends is None:
            raise Failed("no_tokens", "the response's tokens do not decode to its text, so its steps have no places")
        return Verdict(fmean(values) if values else 0.0, steps=tuple(zip(ends, values, strict=True)))


def split_steps(text: str, pattern: str) -> list[str]:
    """Steps that joined are the text, each with what ends it. White space alone is no step but part of a neighbour."""
    steps, start = [""], 0
    for end in [match.end() for match in re.finditer(pattern, text)] + [len(text)]:
        if not steps[-1].strip():
            steps[-1] += text[start:end]
        elif text[start:end].strip():
            steps.append(text[start:end])
        else:
            steps[-1] += text[start:end]
        start = end
    return steps if steps[0] else []


def token_ends(decode: Decode, tokens: Sequence[int], steps: Sequence[str]) -> list[int] | None:
    """For each step the index of the token with which its last character is complete; None: tokens are not the text.

    A character may be spread over several tokens, and a token may reach into the next step: the step ends with the
    first token after which the decoded text begins with everything up to the step's end.
    """
    text = "".join(steps)
    if decode(tokens) != text:
        return None
    ends: list[int] = []
    base, base_char, char, low = 0, 0, 0, 1  # decoding may start at `base`: text[base_char:] is what follows
    for step in steps:
        char += len(step)
        wanted = text[base_char:char]

        def complete(count: int, base: int = base, wanted: str = wanted) -> bool:
            return decode(tokens[base:count]).startswith(wanted)

        high, width = low, 1
        while high < len(tokens) and not complete(high):
            low, high, width = high + 1, min(high + width, len(tokens)), width * 2
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if complete(middle) else (middle + 1, high)
        ends.append(low - 1)
        if decode(tokens[base:low]) == wanted and decode(tokens[low:]) == text[char:]:
            base, base_char = low, char
    return ends
