"""Finds the final answer in a response, before any judge sees it, in linear time.

response --after any thinking--> tag | boxed | last_line | last_number | whole --> final answer
"""

import re

from megarl.config.schema import AnswerPlace

BOXED = "\\boxed"
# a minus between terms is not a sign
NUMBER = re.compile(r"(?:(?<![\w)\]])-)?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
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
        if "<answer>" in text:
            place = "tag"
        elif BOXED in text:
            place = "boxed"
    if place == "tag":
        start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
        if start < 0:
            return None
        return text[start + len("<answer>") : text.index("</answer>", start)].strip()
    if place == "boxed":
        # in a single pass, since a text may be all braces
        opened = []
        start = -1
        end = -1
        for match in BRACE.finditer(text):
            if match[0] == "{":
                opened.append(match.start())
            elif match[0] == "}" and opened:
                brace = opened.pop()
                if brace > start and text.endswith(BOXED, 0, brace):
                    start = brace
                    end = match.start()
        if start < 0:
            return None
        return text[start + 1 : end].strip()
    if place == "last_number":
        number = None
        for match in NUMBER.finditer(text):
            number = match[0].replace(",", "")
        return number
    if place == "last_line":
        return text.rpartition("\n")[2].strip() or None
    return text
