"""The built-in reward functions: text or tokens -> float. functions.py describes the arguments.

No torch; heavy parsers are imported when they are first needed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence

BOXED = "\\boxed"
MAX_MATHS_CHARS = 2000  # longer answers are not parsed as mathematics, only compared as text


def accuracy(*, response: str, answer: str | None, score: Callable[[str], float] | None = None) -> float:
    """The result of the task's own `score` function, or 1 if the final answer equals the reference as text or maths.

    A `score` that is not callable is a column of the task's file and is ignored.
    """
    final = final_answer(response)
    if callable(score):
        return float(score(final))
    if answer is None:
        raise ValueError("the problem has no answer to compare with")
    return float(_normalise(final) == _normalise(answer) or _equal_maths(final, answer))


def format_think(*, response: str) -> float:
    """1 if the response is one <think>...</think> followed by an answer, else 0."""
    before, opened, rest = response.partition("<think>")
    _, closed, after = rest.partition("</think>")
    once = bool(opened and closed) and "<think>" not in rest and "</think>" not in after
    return float(once and not before.strip() and bool(after.strip()))


def even_fraction(*, tokens: Sequence[int]) -> float:
    """The share of even ids among the response's tokens; it varies even for random models."""
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)


def final_answer(response: str) -> str:
    """The text after any thinking; within it, the content of the last <answer>...</answer> or \\boxed{...} if any."""
    text = response.rpartition("</think>")[2]
    tagged, closed, _ = text.rpartition("</answer>")
    if closed and "<answer>" in tagged:
        return tagged.rpartition("<answer>")[2].strip()
    return (_boxed(text) or text).strip()


def _boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} with balanced braces, in a single pass: a text may be all braces."""
    opened: list[int] = []
    start, end = -1, -1
    for match in re.finditer(r"[{}]", text):
        if match[0] == "{":
            opened.append(match.start())
        elif opened and (brace := opened.pop()) > start and text.endswith(BOXED, 0, brace):
            start, end = brace, match.start()
    return None if start < 0 else text[start + 1 : end]


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


BUILT_IN: dict[str, Callable[..., float]] = {"accuracy": accuracy, "format": format_think}
