"""The rule `accuracy` as it was: math-verify judged every answer, and reads words as products of letters."""

from __future__ import annotations

import logging

import math_verify


def accuracy(*, final_answer: str | None, answer: str) -> float:
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold, target = (
        math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=0)
        for text in (answer, final_answer or "")
    )
    return float(bool(math_verify.verify(gold, target, timeout_seconds=None)))
