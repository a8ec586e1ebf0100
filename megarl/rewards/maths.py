"""Compares a final answer with a reference: as text, as a number with its unit, as mathematics.

    the same words, choice or number                          --> right
    another unit, not mathematics, not the form of one answer --> wrong
    everything else                                           --> equalities for math-verify

math-verify (in a separate process: megarl.jail.judging) drops signs that it does not know, takes
the last value of a text that it cannot parse, and reads words as products of letters: 'silent'
equals 'listen'. So it only gets mathematics in the form of one answer: no expression that is left
to evaluate, no chain of values, no alternatives.
"""

import logging
import re
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from math import isfinite
from typing import Any

from megarl.rewards.interface import ScoreError
from megarl.rewards.reading import (
    BALANCED,
    CHOICE,
    OTHER_CHOICE,
    UPRIGHT,
    plain_latex,
    read_number,
    read_quantity,
    tokens_of,
)

MAX_CHARS = 2000  # longer answers are only compared as text
COMMAND = re.compile(r"\\(?:begin|end)\{\w+\}|\\(?:[A-Za-z]+|.)", re.DOTALL)
# labels, which are not mathematics: H2O, e4, 2024-01-05, 12:30, 1:2:3
LABEL = re.compile(r"[A-Za-z][0-9]|[0-9][-/.][0-9]+[-/.][0-9]|[0-9]\s?:\s?[0-9]+(?:[0-9]|\s?:)")
MISREAD = re.compile(
    r"(?<!_)[0-9]\s+[0-9]|\([0-9.]+\)\s*\([0-9]|\.(?![0-9\\])|[A-Za-z]\s*\.|[0-9}]\s*_"
)  # math-verify reads 8 9 as the sum 17, and 17_2 as 17
GREEK = """
alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau
phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega
"""
LETTER = (
    rf"(?:[A-Za-z]|\\(?:{'|'.join(GREEK.split())})(?![A-Za-z])"
    r"|\\(?:bar|vec|hat|overline)\s?\{\w+\})"
    r"'?(?:\s?_\s?(?:\w|\{[\w+-]*\}))?"
)
LETTERS = rf"\s*{LETTER}(?:\s*[,+]\s*{LETTER})*\s*"
# the left side of name = value: x_1, f(x), m+n, (x,y), \angle ABC, Total cost
NAME = re.compile(
    r"(?!.*\b(?:not|or|and|but|no|non|never|wrong|except|than|isn|anything)\b)\s*"
    rf"(?:{LETTERS}|(?:{LETTER})?\({LETTERS}\)|m?\s*\\angle\s*\w+"
    r"|[^\W\d_]{2}(?:[^\W\d]|[\s'])*)\s*"
)
EQUALS = r"=|\\in(?=\s*[\[({\\])"
AND = re.compile(r"(?:,\s*|(?<![A-Za-z\\]))and(?![A-Za-z])")
COMMA = r",\s*(?:and|or)\b|,(?![0-9]{3}(?![0-9]))|;|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
HALF_LINE = re.compile(r"\s*[A-Za-z]\s*(<|>|\\le|\\ge)(?![A-Za-z])([^<>=]*)")
INTERVALS = {
    "<": "(-\\infty,{})",
    ">": "({},\\infty)",
    "\\le": "(-\\infty,{}]",
    "\\ge": "[{},\\infty)",
}
BINARY = r"[*/^_=<>]|\\(?:times|cdot|div|le|ge|ne|approx|in|to|equiv|sim)(?![A-Za-z])"
INCOMPLETE = re.compile(rf"\s*(?:{BINARY}).*|.*(?:{BINARY}|[-+\\]|\\pm)\s*\Z", re.DOTALL)
# math-verify reads these tokens correctly; any other token must be in the reference as well
KNOWN = r"""
frac pi cdot cdots ldots dots times pm mp infty le ge cup cap setminus emptyset overline vec hat
mathbb begin end pmatrix bmatrix matrix \ { } $ %
"""
COMMANDS = {f"\\{name}" for name in (KNOWN + GREEK).split()}
PLAIN = re.compile(r"[0-9.]+|[A-Za-z]{1,2}|[+*/^(){}\[\],=<>|_-]|[pb]?matrix")
# math-verify evaluates these; an answer may use one if the reference has one of the same line
EVALUATED = r"""
\sum \prod \int \lim
\gcd \lcm \max \min \lfloor \lceil \rfloor \rceil \bmod \pmod \mod
! \binom
\log \ln \lg
\exp
\sin \cos \tan \cot \sec \csc \sinh \cosh \tanh \arcsin \arccos \arctan
\sqrt
"""
CLASSES = [{*line.split()} for line in EVALUATED.splitlines()]

PERCENT = "*%^1"

# (reference, answer, other sides of the answer's equation): all must be equal as mathematics
Equality = tuple[str, ...]


def compare(candidate: str, answer: object) -> bool | list[Equality]:
    """Compares a candidate with a reference; one reference of a list must match.

    Returns True or False, or the equalities of which one must hold. Raises ScoreError if the
    reference is not a text, a number, a boolean or a list of these.
    """
    equalities = []
    for text in texts_of(answer):
        equalities += _compare_texts(candidate, text)
    if any(len({*equality}) == 1 for equality in equalities):
        return True
    return equalities or False


def texts_of(answer: object) -> list[str]:
    """Returns a reference as a list of texts.

    Raises ScoreError if it is empty, or has a value that is not a text, a number or a boolean.
    """
    if isinstance(answer, list | tuple) and answer:
        return [text for one in answer for text in texts_of(one)]
    if isinstance(answer, float) and isfinite(answer):
        return [f"{Decimal(repr(answer)):f}"]
    if isinstance(answer, str | int):
        return [str(answer)]
    raise ScoreError(
        "error",
        f"the problem has no answer to compare with, but {str(answer)[:80]}; "
        "write a text, a number or a list",
    )


def _compare_texts(candidate: str, answer: str) -> list[Equality]:
    same = [(answer, answer)]
    if max(len(candidate), len(answer)) > MAX_CHARS:
        return same if candidate.split() == answer.split() else []
    candidate = plain_latex(candidate)
    answer = plain_latex(answer)
    if candidate.lower() in ("", "nan"):
        return []
    if tokens_of(candidate) == tokens_of(answer):
        return same
    letter, text = CHOICE.findall(candidate)[0]
    right_letter, right_text = CHOICE.findall(answer)[0]
    if letter and right_letter:
        is_name = re.match(r"[A-J]\.\s*[^\W\d_]", answer)  # for example E. coli
        if letter != right_letter or OTHER_CHOICE.search(text) or (is_name and not text):
            return []
        if not (text and right_text):
            return same
    return _compare_named(text or candidate, right_text or answer)


def _compare_named(candidate: str, answer: str) -> list[Equality]:
    """Compares named values (x = 17; x = 1, x = 2; x \\in [0, 1]) by value, other equations as a
    whole.
    """
    name, value = _split_name(answer)
    our_name, our_value = _split_name(candidate)
    is_equation = len(_split(candidate, EQUALS)) > 1
    if name and (our_name == name or not (is_equation or "+" in name)):  # 5 is not x+y=5
        return _compare_sides(our_value, value)
    if len(_split(answer, EQUALS)) == 1:
        return _compare_sides(our_value, answer)
    if is_equation:
        return _compare_values(candidate, answer)
    return []


def _split_name(text: str) -> tuple[str, str]:
    """Splits name = value into (name, value); the name is "" if the text has none.

    For x = 1, y = 2 the name is (x,y) and the value (1,2).
    """
    name = ""
    named = []
    for part in _split(text, COMMA):
        sides = _split(part, EQUALS)
        if not NAME.fullmatch(sides[0]):  # the name is on the right: 5 = x
            sides.reverse()
        if len(sides) > 1 and NAME.fullmatch(sides[0]):
            name = "".join(tokens_of(sides.pop(0)))
        elif len(sides) > 1 or not name:
            return "", text
        named.append((name, "=".join(sides)))
    if len(dict(named)) > 1:
        names, values = [",".join(column) for column in zip(*sorted(named), strict=True)]
        return f"({names})", f"({values})"
    return name, ",".join(value for _, value in named)


def _compare_sides(text: str, answer: str) -> list[Equality]:
    """Compares every side of an equation with the reference: for 17, 10 + 7 = 17 is right, but
    18 = 17 is not.
    """
    *others, last = _split(text, EQUALS)
    others = [side for side in others if not NAME.fullmatch(side)]
    if not all(_is_comparable(side, answer) for side in others):
        return []
    return [(*equality, *others) for equality in _compare_quantities(last, answer)]


def _compare_quantities(candidate: str, answer: str) -> list[Equality]:
    our_value, our_unit, our_scale = read_quantity(candidate)
    value, unit, scale = read_quantity(answer)
    # the answer may omit the unit; a reference without a unit accepts any
    if unit not in ("", our_unit) and (our_unit or "#" in unit):
        return []
    values = [value]
    if scale == PERCENT and not (our_scale or our_unit):
        values.append(_percent(value))  # 50% equals 0.5, and 50 if the task asks for a percentage
    elif our_scale == PERCENT and not (scale or _is_whole(value)):
        our_value = _percent(our_value)  # not if the reference is whole: 500% is not 5
    elif our_scale != scale:
        return []
    equalities = []
    for one in values:
        equalities += _compare_values(our_value, one)
    return equalities


def _percent(value: str) -> str:
    number = read_number(value)
    if number is None:
        return f"\\frac{{{value}}}{{100}}"
    return f"{Decimal(number + 'e-2'):f}"


def _is_whole(text: str) -> bool:
    return re.fullmatch(r"[-+]?[0-9]+(\.0*)?", read_number(text) or "") is not None


def _compare_values(candidate: str, answer: str) -> list[Equality]:
    candidate = _spell_out(candidate)
    answer = _spell_out(answer)
    same = [(answer, answer)]
    ours = read_number(candidate)
    theirs = read_number(answer)
    is_same = tokens_of(candidate) == tokens_of(answer)
    if is_same or (ours and theirs and Decimal(ours) == Decimal(theirs)):
        return same
    if _is_whole(candidate) and _is_whole(answer):  # a fraction may have been rounded
        return []
    if theirs and re.search("[A-Za-z]", COMMAND.sub("", candidate)):  # x/x is not 1
        return []
    number, _, base = re.sub(r"[\s{}]", "", answer).partition("_")
    if base.isdigit() and number[:1].isdigit():
        bare = re.sub(r"[\s{}]", "", candidate)
        return same if bare in (number, f"{number}_{base}") else []
    if is_mathematics(answer) and _is_comparable(candidate, answer):
        return [(answer, candidate)]
    return []


def _spell_out(text: str) -> str:
    """Rewrites notations as LaTeX that math-verify reads: 1,234 without its comma; 4.5e33;
    x < 1 or x > 2; 2 > x > 1.
    """
    lines = [HALF_LINE.fullmatch(part) for part in re.split(r",|\bor\b", text)]
    if len(lines) > 1 and all(lines):
        return r"\cup".join(INTERVALS[line[1]].format(line[2].strip()) for line in lines if line)
    text = AND.sub(",", text.replace(UPRIGHT, " ")).strip()
    text = read_number(text) or text
    text = re.sub(r"([-+]?[0-9.]+)[eE]([-+]?0*[1-9][0-9]*)", r"\1\\times 10^{\2}", text)
    text = re.sub(r"(-?[0-9]+) ([0-9]+)/([0-9]+)", r"\1\\frac{\2}{\3}", text)
    sides = re.split(r"(>|\\ge(?![A-Za-z]))", text)
    if len(sides) == 5 and not re.search(r"[<,=]|\\le", text):
        return "".join(reversed(sides)).replace(">", "<").replace("\\ge", "\\le ")
    return text


def is_mathematics(answer: str) -> bool:
    """Returns True if a reference is mathematics, not a label or prose.

    Mathematics is a single letter, or has a digit, an operator or a command.
    """
    text = COMMAND.sub(" ", answer)
    if re.search("[A-Za-z]{3}", text) or LABEL.search(text) or MISREAD.search(answer):
        return False
    is_plain = re.search(r"[0-9+*/^=<>|()\[\]{}\\-]|\A\W*[A-Za-z]\W*\Z", answer)
    return bool(is_plain) and not INCOMPLETE.fullmatch(answer)


def _is_comparable(text: str, answer: str) -> bool:
    """Returns True if a text has the form of one answer and math-verify reads it correctly."""
    ours = _opening(text)
    theirs = _opening(answer)
    tokens = _tokens(answer)
    known = tokens.union(COMMANDS, *(line for line in CLASSES if line & tokens))
    return (
        re.fullmatch(BALANCED, text) is not None
        and all(PLAIN.fullmatch(token) for token in _tokens(text) - known)
        and not (INCOMPLETE.fullmatch(text) or MISREAD.search(text))
        # {1, 2} is not (1, 2)
        and ("," not in answer or ours in ("", ",", theirs) or (ours, theirs) == ("\\{", ","))
    )


def _tokens(text: str) -> set[str]:
    text = text.replace(r"\frac{d}{d", r"\int{{")
    return {*tokens_of(re.sub(r"\^\{[^{}]*(?:/|\\frac|\.)", r"\\sqrt \g<0>", text))}


def _opening(text: str) -> str:
    """Returns the bracket that opens a text, or a comma for a list without brackets."""
    if len(_split(text, COMMA)) > 1:
        return ","
    return "".join(re.findall(r"\A\\?[({\[](?!.*\\cup)", text))


def _split(text: str, separator: str) -> list[str]:
    """Splits a text at each match of the pattern `separator` outside all brackets."""
    pieces = []
    start = 0
    depth = 0
    for match in re.finditer(rf"\\?[()\[\]{{}}]|{separator}", text):
        end = match[0][-1]
        if end in "([{":
            depth += 1
        elif end in ")]}":
            depth -= 1
        elif depth <= 0:
            pieces.append(text[start : match.start()])
            start = match.end()
    return [*pieces, text[start:]]


# --- the judge's process --------------------------------------------------------------------------


def import_math_verify() -> None:
    """Imports math-verify and fills its parser's caches, which forked processes then share."""
    text = r"\{\frac{1}{2}, x^2 + \sqrt{3}\}"
    make_judge(None)([(text, text)])


def make_judge(context: None) -> Callable[[list[Equality]], float]:
    """Returns ``judge(equalities)``, which returns 1.0 if one of the equalities holds, else 0.0."""
    import math_verify

    # math-verify's own time limits are off: they need the process's only alarm
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    from sympy import Add, Basic, MatAdd, Mul, Number, preorder_traversal

    verify = partial(math_verify.verify, timeout_seconds=None, allow_set_relation_comp=True)

    def is_left(expression: Any) -> bool:
        """Returns True if an expression is left to evaluate.

        That is, if a sum in it has like terms or a zero, if a product has two numbers, or if it
        adds matrices. The parser only evaluates fractions, not 1 - 1/2, 8 + 9, 2 * 9 or pi + pi.
        """
        for node in preorder_traversal(expression):
            if isinstance(node, Add):
                terms = Add(*(Mul(*Mul.make_args(arg)) for arg in node.args))
                if len(Add.make_args(terms)) < len(node.args):
                    return True
            if isinstance(node, Mul):
                numbers = [arg for arg in node.args if isinstance(arg, Number) and arg != -1]
                if len(numbers) > 1:
                    return True
            if isinstance(node, MatAdd):
                return True
        return False

    def is_near(gold: Any, other: Any) -> bool:
        """Returns False for numbers that are equal only because both round to 0 (1e-34, 2e-34)."""
        if not all(isinstance(value, Basic) and value.is_number for value in (gold, other)):
            return True
        gold, other = (complex(value.doit().evalf()) for value in (gold, other))
        return gold == other or abs(gold - other) <= 1e-4 * abs(gold)

    def is_true(equality: Equality) -> bool:
        boxed = [f"\\boxed{{{text}}}" for text in equality]
        gold, *parsed = [math_verify.parse(text, parsing_timeout=0) for text in boxed]
        if not all(verify(gold, text) and is_near(gold[0], text[0]) for text in parsed):
            return False
        return is_left(gold[0]) or not is_left(parsed[0][0])

    return lambda equalities: float(any(map(is_true, equalities)))
