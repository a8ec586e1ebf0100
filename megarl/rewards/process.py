"""The `process` reward: scores the steps of a response, each at the token that completes it.

    text --splitter--> steps (their concatenation is the text) --scorer--> one number per step
         --token ends--> Sample.step_rewards

    rewards: [{name: process, options: {splitter: paragraph, scorer: "my_package.steps:score"}},
              {name: accuracy, weight: 1.0}]  # an outcome reward still becomes Sample.reward
    algorithm: {advantage: grpo_process}

The scorer is a function ``f(prompt, steps, answer, ...) -> one float per step`` or a URL
(remote.py). `weight` scales each step's reward. Sample.reward is the sum of the outcome rewards; if
there are none, it is the weighted mean of the steps, for display only. A step without a finite
score drops the sample. Rewards of steps that end inside the same token add up.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megarl.config.schema import Reward
from megarl.config.section import Pattern
from megarl.jail.workers import CallError, worker_of
from megarl.rewards.functions import FunctionReward
from megarl.rewards.interface import (
    BatchReward,
    Decode,
    Score,
    ScoreError,
    ScoreRequest,
    parse_options,
    try_score,
)
from megarl.rewards.remote import HttpClient, HttpOptions, finite_number, request_row, score_batches

SPLITTERS = {  # name -> pattern of the delimiter, which ends a step and belongs to it
    "paragraph": r"\n[ \t]*\n\s*",
    "newline": r"\n\s*",
    "sentence": r"[.!?]+[\"')\]]*\s+|[\u3002\uff01\uff1f]+\s*|\n\s*",
}
Splitter = Literal["paragraph", "newline", "sentence"]


class ProcessOptions(HttpOptions):
    """Options of process rewards; `batch_size` and those of HttpOptions apply to URLs only."""

    scorer: str
    splitter: Splitter | Literal["regex"] = "paragraph"
    pattern: Pattern = ""  # for splitter: regex; matches the end of a step
    options: dict[str, Any] = Field(default_factory=dict)  # passed to the scorer, if a function
    function_s: PositiveFloat = 10.0  # time limit for one sample, if the scorer is a function
    batch_size: PositiveInt = 32

    @model_validator(mode="after")
    def _consistent(self) -> "ProcessOptions":
        if (self.splitter == "regex") != bool(self.pattern):
            raise ValueError(
                f"splitter={self.splitter!r}, pattern={self.pattern!r}; "
                "pattern and regex go together"
            )
        return self


def make_process(reward: Reward, decode: Decode) -> BatchReward:
    """Returns the `process` reward; `decode` must return the response's text for its tokens.

    Raises ValueError if an option is wrong.
    """
    options = parse_options(ProcessOptions, reward)
    total_s = None
    check = None
    if "://" in options.scorer:
        scorer = HttpClient(options.scorer, options, name=reward.name)
        total_s = scorer.total_s
    else:
        scorer = FunctionReward(
            options.scorer,
            options.options,
            "rewards: name='process', scorer",
            f"process, scorer {options.scorer}",
            options.function_s,
            context=("steps",),
        )
        check = scorer.check
    score = _Process(options, decode, scorer)
    return BatchReward(reward.name, reward.weight, score, total_s, check)


@dataclass(frozen=True)
class _Process:
    options: ProcessOptions
    decode: Decode
    scorer: FunctionReward | HttpClient

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        steps = [self._split(request) for request in requests]
        scores = {}  # row -> the server's scores
        if isinstance(self.scorer, HttpClient):
            split = [row for row, texts in enumerate(steps) if texts and isinstance(texts, list)]
            payload = [request_row(requests[row]) | {"steps": steps[row]} for row in split]
            answers = score_batches(self.scorer, payload, self.options.batch_size, key="steps")
            scores |= zip(split, answers, strict=True)
        return [
            try_score(self._score, request, steps[row], scores.get(row, []))
            for row, request in enumerate(requests)
        ]

    def _split(self, request: ScoreRequest) -> list[str] | CallError:
        pattern = self.options.pattern or SPLITTERS[self.options.splitter]
        worker = worker_of(__name__)
        limit_s = self.options.function_s
        try:
            return worker.call(split_steps, request.response, pattern, timeout_s=limit_s)
        except CallError as error:
            return error

    def _score(self, request: ScoreRequest, steps: list[str], scores: Any) -> Score:
        if steps and isinstance(self.scorer, FunctionReward):
            scores = self.scorer.call(request, steps=steps)
        if hasattr(scores, "tolist"):
            scores = scores.tolist()
        source = self.options.scorer
        result = f"a {type(scores).__name__}"
        if isinstance(scores, list | tuple):
            result = f"{len(scores)} scores"
        if result != f"{len(steps)} scores":
            raise ScoreError("bad_answer", f"{source} returned {result} for {len(steps)} steps")
        values = [finite_number(score, source) for score in scores]
        ends = token_ends(self.decode, request.tokens, steps)
        if ends is None:
            raise ScoreError(
                "no_tokens",
                "tokens do not decode to the response's text, so its steps cannot be located",
            )
        return Score(fmean(values) if values else 0.0, steps=tuple(zip(ends, values, strict=True)))


def split_steps(text: str, pattern: str) -> list[str]:
    """Splits `text` after every match of `pattern`.

    A piece of white space alone is not a step; it is joined to a neighbouring step.
    """
    steps = [""]
    start = 0
    for end in [*(match.end() for match in re.finditer(pattern, text)), len(text)]:
        piece = text[start:end]
        if steps[-1].strip() and piece.strip():
            steps.append(piece)
        else:
            steps[-1] += piece
        start = end
    if not steps[0]:
        return []
    return steps


def token_ends(decode: Decode, tokens: Sequence[int], steps: Sequence[str]) -> list[int] | None:
    """Returns the index of the token that completes each step's last character.

    Returns None if `tokens` do not decode to the text. A character may span several tokens, and a
    token may reach into the next step: a step ends with the first token after which the decoded
    text contains the whole step.
    """
    text = "".join(steps)
    if decode(tokens) != text:
        return None
    ends = []
    # tokens[base:] decode to text[base_char:]
    base = 0
    base_char = 0
    char = 0
    low = 1
    for step in steps:
        char += len(step)
        wanted = text[base_char:char]

        def complete(count: int, base: int = base, wanted: str = wanted) -> bool:
            return decode(tokens[base:count]).startswith(wanted)

        high = low
        width = 1
        while high < len(tokens) and not complete(high):
            low = high + 1
            high = min(high + width, len(tokens))
            width *= 2
        low += bisect_left(range(low, high), True, key=complete)
        ends.append(low - 1)
        if decode(tokens[base:low]) == wanted and decode(tokens[low:]) == text[char:]:
            base = low
            base_char = char
    return ends
