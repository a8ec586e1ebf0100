"""math-verify as a judge, in a process of its own (megarl.jail.judging)."""

from __future__ import annotations

import logging
from collections.abc import Callable


def import_math_verify() -> None:
    """Imports it, and fills the caches of its parser for the processes that are forked."""
    verify = make_judge(None)
    for text in (r"\frac{1}{2}", r"x^2 + \sqrt{3}", "17", r"\{1, 2\}"):
        verify((text,), text)


def make_judge(context: None) -> Callable[[tuple[str, ...], str], float]:
    """``judge(texts, answer)`` is 1 if all texts equal the answer, else 0."""
    import math_verify

    # without its own time limits, which need the process's only alarm
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def judge(texts: tuple[str, ...], answer: str) -> float:
        gold, *parsed = (math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=0) for text in (answer, *texts))
        return float(all(math_verify.verify(gold, text, timeout_seconds=None) for text in parsed))

    return judge
