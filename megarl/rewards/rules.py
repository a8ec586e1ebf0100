"""Rewards that are rules: text or tokens -> float. No torch, and heavy parsers only when they are first needed.

A reward is a function ``f(prompt, response, answer, tokens, finish, **extra) -> float`` that may leave out any
argument it does not need: `prompt` and `response` are texts, `answer` is the task's, `tokens` are the response's
ids, `finish` is stop or length; `extra` is what the task says of the problem (at `score` a function, where the
task judges answers itself) and the reward's own options.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence

__all__ = [
    "BUILT_IN", "accuracy", "even_fraction", "final_answer", "format_think",
]  # fmt: skip

BOXED = "\\boxed"
LONGEST_ANSWER = 2000  # characters that are parsed as mathematics; what is longer must be the reference as text


def accuracy(*, response: str, answer: str | None, score: Callable[[str], float] | None = None) -> float:
    """The task's own scorer where it has one; else 1 when the final answer is the reference, as text or as maths.

    A `score` that cannot be called is no scorer but a column of the task's file, and is not looked at.
    """
    given = final_answer(response)
    if callable(score):
        return float(score(given))
    if answer is None:
        raise ValueError("the problem has no answer to compare with")
    return float(_normal(given) == _normal(answer) or _equal_maths(given, answer))


def format_think(*, response: str) -> float:
    """1 when the response is one <think>...</think> and then an answer, else 0."""
    before, opened, rest = response.partition("<think>")
    _, closed, after = rest.partition("</think>")
    once = bool(opened and closed) and "<think>" not in rest and "</think>" not in after
    return float(once and not before.strip() and bool(after.strip()))


def even_fraction(*, tokens: Sequence[int]) -> float:
    """The share of even ids among the response's tokens: a pure function of them, for models that know nothing."""
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)


def final_answer(response: str) -> str:
    """What follows the thinking; of that, the last <answer>...</answer> or \\boxed{...} where there is one."""
    text = response.rpartition("</think>")[2]
    tagged, closed, _ = text.rpartition("</answer>")
    if closed and "<answer>" in tagged:
        return tagged.rpartition("<answer>")[2].strip()
    return (_boxed(text) or text).strip()


def _boxed(text: str) -> str | None:
    """The inside of the last \\boxed{...} whose braces balance, in one pass: a text may be all braces."""
    opened: list[int] = []
    best: tuple[int, int] | None = None
    for match in re.finditer(r"[{}]", text):
        place = match.start()
        if match[0] == "{":
            opened.append(place)
        elif opened:
            start = opened.pop()
            if text.endswith(BOXED, 0, start) and (best is None or start > best[0]):
                best = (start, place)
    return None if best is None else text[best[0] + 1 : best[1]]


def _normal(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def _equal_maths(given: str, answer: str) -> bool:
    if len(given) > LONGEST_ANSWER:
        return False
    import math_verify

    # its own time limits want the process's one alarm; whoever calls this limits the whole sample (limits.py)
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # and it warns of that at every call
    gold, target = (math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=0) for text in (answer, given))
    return bool(math_verify.verify(gold, target, timeout_seconds=None))


BUILT_IN: dict[str, Callable[..., float]] = {"accuracy": accuracy, "format": format_think}
