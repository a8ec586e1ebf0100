"""Finds the final answer in a response, before any judge sees it. Pure, linear in the length of the text, no imports.

response --after any thinking--> tag | boxed | last_line | last_number | whole --> final answer, or None
"""

from __future__ import annotations

import re
from collections import deque

from megarl.config.schema import AnswerPlace

BOXED = "\\boxed"
NUMBER = re.compile(
    r"(?:(?<![\w)\]])-)?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?"
)  # a minus between terms is not a sign
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # \{ and \} are text


def extract_answer(response: str, place: AnswerPlace) -> str | None:
    """Returns the final answer without surrounding white space, or None if the response has none.

    tag          the content of the last <answer>...</answer>
    boxed        the content of the last \\boxed{...} whose braces balance
    last_line    the last line that is not empty
    last_number  the last number, without thousands separators
    whole        everything
    auto         tag if there is an <answer>, else boxed if there is a \\boxed, else whole

    Thinking ends with the last </think>; a response that is cut off while thinking has no answer.
    """
    text = response.rpartition("</think>")[2].strip()
    if "<think>" in text:
        return None
    if place == "auto":
        place = "tag" if "<answer>" in text else "boxed" if BOXED in text else "whole"
    if place == "tag":
        start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
        return (
            None
            if start < 0
            else text[start + len("<answer>") : text.index("</answer>", start)].strip()
        )
    if place == "boxed":
        return _boxed(text)
    if place == "last_number":
        number = deque(NUMBER.finditer(text), maxlen=1)
        return number[0][0].replace(",", "") if number else None
    return text.rpartition("\n")[2].strip() or None if place == "last_line" else text


def _boxed(text: str) -> str | None:
    """In a single pass: a text may be all braces."""
    opened: list[int] = []
    start, end = -1, -1
    for match in BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif (
            match[0] == "}"
            and opened
            and (brace := opened.pop()) > start
            and text.endswith(BOXED, 0, brace)
        ):
            start, end = brace, match.start()
    return None if start < 0 else text[start + 1 : end].strip()
