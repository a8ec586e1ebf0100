"""The built-in reward functions: text or tokens -> float. functions.py describes the arguments.

No torch; heavy parsers are imported when they are first needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from megarl.rewards.interface import Score

MAX_MATHS_CHARS = 2000  # longer answers are not parsed as mathematics, only compared as text


def accuracy(*, final_answer: str | None, answer: str | None, score: Callable[[str], float] | None = None) -> Score:
    """The result of the task's own `score` function, or 1 if the final answer equals the reference as text or maths.

    A response without a final answer scores 0. A `score` that is not callable is a column of the task's file and is
    ignored.
    """
    if final_answer is None:
        return Score(0.0, "no_answer", "there is nothing at the place that task.answer names")
    if callable(score):
        return Score(float(score(final_answer)))
    if answer is None:
        raise ValueError("the problem has no answer to compare with")
    return Score(float(_normalise(final_answer) == _normalise(answer) or _equal_maths(final_answer, answer)))


def format_think(*, response: str) -> float:
    """1 if the response is one <think>...</think> followed by an answer, else 0."""
    before, opened, rest = response.partition("<think>")
    _, closed, after = rest.partition("</think>")
    once = bool(opened and closed) and "<think>" not in rest and "</think>" not in after
    return float(once and not before.strip() and bool(after.strip()))


def even_fraction(*, tokens: Sequence[int]) -> float:
    """The share of even ids among the response's tokens; it varies even for random models."""
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)


def _normalise(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def _equal_maths(candidate: str, answer: str) -> bool:
    if len(candidate) > MAX_MATHS_CHARS:
        return False
    import math_verify

    # without its own time limits, which need the process's only alarm; FunctionReward limits the whole call
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of that at every call
    gold, target = (math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=0) for text in (answer, candidate))
    return bool(math_verify.verify(gold, target, timeout_seconds=None))


BUILT_IN: dict[str, Callable[..., float | Score]] = {"accuracy": accuracy, "format": format_think}
