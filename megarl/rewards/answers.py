"""Finds the final answer in a response, before any judge sees it, in linear time.

response --after any thoughts--> tag | boxed | last_line | last_number | whole --> final answer
"""

import re

from megarl.config.schema import AnswerPlace
from megarl.data.thoughts import after_thoughts

BOXED = "\\boxed"
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # \{ and \} are text
# marks around a whole answer: $, **, `, \( \) or \[ \]
MARKS = re.compile(
    r"\A(?:(\$\$?|\*\*|`)((?:(?!\1).)*)\1|\\[(\[]((?:(?!\\[()\[\]]).)*)\\[)\]])\Z", re.DOTALL
)
MAX_MARKS = 4
# A number with everything attached to it: 3/7, 2^10, 2.5e3, 12:30, 2024-01-05, \frac{3}{7}, x_5,
# 7 million. Text next to a number belongs to it only if it is one of the signs and words below.
NUMBER = re.compile(
    r"""
    (?:(?<![\w)\]}])(?<![0-9)\]}][ ])[-+\u2212\u2013][ ]?)?    # no minus between terms
    (?:
        (?<=[0-9]) (?:,|\\[,; ]|\\?[ \u00a0\u2009\u202f]) (?=[0-9]{3}(?![0-9]))    # thousands
      | \\?(?:sqrt|ln|log|exp|sin|cos|tan|minus|negative|choose|over) [ ] (?=[0-9])
      | [A-Za-z0-9_.{}\\%\u00b0^/!\u221a\u03c0\u00b2\u00b3\u00b9\u2070-\u209f\u00bc-\u00be]
      | (?<=[0-9]) [ ] (?=[0-9]+[ ]?/[ ]?[0-9])                                    # 1 2/3
      | (?<=[0-9{^eE/]) [-+\u2013] (?=[0-9.])                                      # 2024-01-05
      | (?<=[0-9]) : (?=[0-9])
      | (?<=[\^/_A-Za-z0-9]) \( | (?<=[0-9]) \) (?=[(0-9^])
      | (?<=[0-9})]) [ ]? (?:[/^*_\u00d7\u00b7\u00f7]|\\times|\\cdot|\\div) [ ]? (?=[-+\w.({\\])
      | (?<=[0-9A-Za-z\u221a]) [ ] (?=\\over|\\pi|\\choose|\\sqrt)
      | (?<=\u221a) [ ]
      | (?<=[0-9]) [ ] (?=(?:hundred|thousand|[mbtr]+illion|percent|dozen|lakh|crore|k|[mb]n|pi
        |choose|squared|cubed|factorial|over|half|halves|thirds?|quarters?|\w+ths?|times)\b)
    )++
    """,
    re.VERBOSE,
)
WRAPPER = re.compile(r"\\(?:boxed|fbox|text[a-z]*|math[a-z]+)(?=\{)")


def extract_answer(response: str, place: AnswerPlace) -> str | None:
    """Returns the final answer without surrounding white space, or None if the response has none.

    tag          the content of the last <answer>...</answer>
    boxed        the content of the last \\boxed{...} whose braces balance
    last_line    the last line that is not empty
    last_number  the last number and everything attached to it, without thousands separators
    whole        the whole response
    auto         tag if there is an <answer>, else boxed if there is a \\boxed, else whole

    If a tag or a line contains a \\boxed{...}, only the content of the box counts. Marks around the
    whole answer, such as $ or **, are removed. A response whose thoughts never end (thoughts.py)
    has no answer. If the prompt opens the thoughts, `response` must begin with their tag.
    """
    text = after_thoughts(response)
    if text is None:
        return None
    text = text.strip()
    if place == "whole":
        return text
    if place == "last_number":
        return _last_number(text)
    if place == "tag" or (place == "auto" and "<answer>" in text):
        start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
        if start < 0:
            return None
        text = text[start + len("<answer>") : text.index("</answer>", start)].strip()
    elif place == "last_line":
        text = text.rpartition("\n")[2].strip()
        if not text:
            return None
    if place == "boxed" or BOXED in text:
        return _boxed(text)
    return without_marks(text)


def _boxed(text: str) -> str | None:
    # a single pass, because a text may consist of braces only
    text = re.sub(r"\\boxed +([\w.+-]+)", r"\\boxed{\1}", text)
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
    return without_marks(text[start + 1 : end])


def without_marks(text: str) -> str:
    """Returns an answer without marks of mathematics or emphasis around the whole of it."""
    for _ in range(MAX_MARKS):
        text = MARKS.sub(r"\2\3", text.strip())
    return text.strip()


def _last_number(text: str) -> str | None:
    last = None
    for match in NUMBER.finditer(text):
        # a number needs a digit; a digit after letters is part of a name, not a number
        if re.search("[0-9]", match[0]) and not re.match(r"[A-Za-z]+_?\{?[0-9]", match[0]):
            last = WRAPPER.sub("", match[0]).rstrip(".\\")
    if last is None:
        return None
    last = re.sub(r"\A\{*([-+]?[0-9,.]+)\}*\Z", r"\1", last)
    return re.sub(r"\\?,", "", last)
