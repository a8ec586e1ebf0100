"""Compares a final answer with a reference, as text, as a number with its unit, as mathematics.

    the same words, choice or number                          --> right
    another unit, not mathematics, not the form of one answer --> wrong
    else                                                      --> equalities for math-verify

math-verify (in its own process: megarl.jail.judging) drops signs it does not know, takes the last
value of what it cannot parse, and reads words as products of letters: 'silent' equals 'listen'. So
it is asked about mathematics only, in the form of one answer: no expression that is left to
evaluate, no chain of values, no alternative.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import partial
from math import isfinite
from typing import Any

from megarl.rewards.reading import (
    HIDDEN,
    OTHER_CHOICE,
    UPRIGHT,
    Quantity,
    plain_latex,
    read_choice,
    read_number,
    read_quantity,
    tokens_of,
)

MAX_CHARS = 2000  # longer answers are only compared as text
COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
WORD = re.compile(r"[A-Za-z]{3,}|(?<=[\s{])[A-Za-z]{2}(?![A-Za-z])")
# H2O, e4, 2024-01-05, 12:30, 1:2:3
LABEL = re.compile(r"[A-Za-z][0-9]|[0-9][-/.][0-9]+[-/.][0-9]|[0-9]\s?:\s?[0-9]+(?:[0-9]|\s?:)")
SPACED = re.compile(
    r"[0-9]\s+[0-9]|\([0-9.]+\)\s*\([0-9]|[0-9]\s*\\div|\.(?![0-9\\])|[A-Za-z]\s*\."
)  # read as a sum: 8 9 as 17
SUBSCRIPTED = re.compile(r"[0-9}]\s*_")  # not read: 17_2 as 17
IN_BASE = re.compile(r"[0-9A-Za-z]+_[0-9]+")
OPERATOR = re.compile(r"[0-9+*/^=<>|()\[\]{}\\-]")
SCIENTIFIC = re.compile(r"([-+]?[0-9.]+)[eE]([-+]?0*[1-9][0-9]*)")
MIXED = re.compile(r"(-?[0-9]+) ([0-9]+)/([0-9]+)")
# the name of a value: x_1, f(x), m+n, (x,y), \angle ABC, Total cost
NAME = re.compile(r"(?:[A-Za-z]|[\s(),+|'/{}-]|\\[A-Za-z]+|_\s?(?:\w|\{[\w+-]*\}))+")
RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|approx|in|to|equiv|sim)(?![A-Za-z])")
NO_NAME = re.compile(rf"\b(?:not|or|and)\b|\\(?:pm|mp)\b|\A[^A-Za-z]*\Z|{RELATION.pattern}")
EQUALS = re.compile("=")
AND = re.compile(r"(?:,\s*|(?<![A-Za-z\\]))and(?![A-Za-z])")
MEMBER = re.compile(r"\\in(?![A-Za-z])")
COMMA = re.compile(
    r",\s*(?:and|or)\b|,(?![0-9]{3}(?![0-9]))|;|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
)
BINARY = r"[*/^_=]|\\(?:times|cdot|div)(?![A-Za-z])|" + RELATION.pattern
INCOMPLETE = re.compile(rf"\s*(?:{BINARY}).*|.*(?:{BINARY}|[-+\\]|\\pm)\s*\Z", re.DOTALL)
# any other sign must be in the reference as well
PLAIN = re.compile(r"[0-9A-Za-z\s+*/^(){}\[\].,=<>|_\\!-]*")
KNOWN = r"""
sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln exp sqrt frac binom choose max
min gcd lcm deg pi cdot cdots ldots dots times div pm mp circ infty sum prod int lim le ge in cup
cap setminus emptyset lfloor rfloor lceil rceil overline vec hat mathbb operatorname begin end
pmatrix bmatrix matrix alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda
mu nu xi rho sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega
\ { } $ %
"""
COMMANDS = set(KNOWN.split())  # math-verify reads these as they are meant
OPENING = re.compile(r"\\?([({\[])")

PERCENT = "*%^1"

Equality = tuple[tuple[str, ...], str]  # texts that must all equal the reference as mathematics
Comparison = bool | list[Equality]  # equalities of which one must be true


def compare(candidate: str, answer: object) -> Comparison:
    """Compares a candidate with a reference, or with each of a list; one must be right.

    Returns whether it is, or the equalities on which it depends. Raises ValueError for a reference
    that is no text, number or truth value.
    """
    return _any(_compare_texts(candidate, text) for text in texts_of(answer))


def texts_of(answer: object) -> list[str]:
    """Returns the texts of a reference: one, or those of a list.

    Raises ValueError for none, and for what is no text, number or truth value.
    """
    if isinstance(answer, list | tuple) and answer:
        return [text for one in answer for text in texts_of(one)]
    if isinstance(answer, float) and isfinite(answer):
        return [f"{Decimal(repr(answer)):f}"]
    if isinstance(answer, str | int):
        return [str(answer)]
    if answer in (None, [], ()) or isinstance(answer, float):
        raise ValueError("the problem has no answer to compare with")
    raise ValueError(f"the answer is a {type(answer).__name__}; write a text, a number or a list")


def _any(results: Iterable[Comparison]) -> Comparison:
    equalities = []
    for result in results:
        if result is True:
            return True
        equalities += result or []
    return equalities or False


def _compare_texts(candidate: str, answer: str) -> Comparison:
    if max(len(candidate), len(answer)) > MAX_CHARS:
        return bool(candidate.strip()) and candidate.split() == answer.split()
    return _compare(plain_latex(candidate), plain_latex(answer))


def _compare(candidate: str, answer: str) -> Comparison:
    words = tokens_of(candidate)
    if not words or words == ["nan"]:
        return False
    if words == tokens_of(answer):
        return True
    letter, text = read_choice(candidate)
    right_letter, right_text = read_choice(answer)
    if letter and right_letter:
        if letter != right_letter or (text and not right_text and OTHER_CHOICE.search(text)):
            return False
        return not text or not right_text or _compare_named(text, right_text)
    return _compare_named(text or candidate, right_text or answer)


def _compare_named(candidate: str, answer: str) -> Comparison:
    """Compares x = 17, x = 1, x = 2 and x \\in [0, 1] by their values, other equations as such."""
    name, (*_, value) = _split_name(answer)
    our_name, sides = _split_name(candidate)
    chain = _split(candidate, EQUALS)
    is_bare = len(chain) == 1 and not MEMBER.search(candidate)
    if name and (our_name == name or (is_bare and not {"+", "-"} & {*name})):  # 5 is no line x+y=5
        return _compare_sides(sides, value)
    if name or len(_split(answer, EQUALS)) > 1:
        return len(chain) > 1 and _compare_values(candidate, answer)
    if MEMBER.search(candidate) and read_number(answer):
        return False
    return _compare_sides(sides if our_name else chain, answer)


def _split_name(text: str) -> tuple[list[str], list[str]]:
    """Returns the words of a value's name, none if it has no name, and what the name equals."""
    name, *members = MEMBER.split(text, maxsplit=1)
    if members and _is_name(name):
        return tokens_of(name), members
    elements = [_split(part, EQUALS) for part in _split(text, COMMA)]
    names = [tokens_of(sides[0]) for sides in elements if len(sides) > 1]
    is_named = len(elements[0]) > 1 and _is_name(elements[0][0])
    if not is_named or names.count(names[0]) < len(names):
        return [], [text]
    if len(elements) == 1:
        return names[0], elements[0][1:]
    return names[0], [", ".join(sides[-1] for sides in elements)]


def _compare_sides(sides: list[str], answer: str) -> Comparison:
    """Compares the last side, and the others if they are no names: 10 + 7 = 17, but not 18 = 17."""
    *others, last = sides
    others = [side for side in others if not _is_name(side)]
    result = _compare_quantities(read_quantity(last), read_quantity(answer))
    if not others or not result:
        return result
    if not all(_is_comparable(side, answer) for side in others):
        return False
    equalities = [((last,), answer)] if result is True else result
    return [((*others, *texts), reference) for texts, reference in equalities]


def _is_name(text: str) -> bool:
    return NAME.fullmatch(text) is not None and not NO_NAME.search(text)


def _compare_quantities(ours: Quantity, theirs: Quantity) -> Comparison:
    if ours.unit and theirs.unit and ours.unit != theirs.unit:
        return False
    # a unit may be left out, and a number may be of anything
    is_other = ours.noun != theirs.noun and (ours.noun or not theirs.is_upright)
    if is_other and (theirs.noun or (theirs.unit and not ours.unit)):
        return False
    if ours.scale == theirs.scale:
        return _compare_values(ours.value, theirs.value)
    if ours.unit or ours.noun or {ours.scale, theirs.scale} != {"", PERCENT}:
        return False
    if theirs.scale:  # 50% is 0.5, and 50 where a percentage was asked for
        values = [theirs.value, _percent(theirs.value)]
        return _any(_compare_values(ours.value, value) for value in values)
    if _is_whole(theirs.value):  # 500% is not 5
        return False
    return _compare_values(_percent(ours.value), theirs.value)


def _percent(value: str) -> str:
    number = read_number(value)
    if number is None:
        return f"\\frac{{{value}}}{{100}}"
    return f"{Decimal(number + 'e-2'):f}"


def _is_whole(text: str) -> bool:
    number = read_number(text)
    return number is not None and not number.partition(".")[2].strip("0")


def _compare_values(candidate: str, answer: str) -> Comparison:
    candidate = _spell_out(candidate)
    answer = _spell_out(answer)
    ours = read_number(candidate)
    theirs = read_number(answer)
    if tokens_of(candidate) == tokens_of(answer):
        return True
    if ours and theirs and Decimal(ours) == Decimal(theirs):
        return True
    if _is_whole(candidate) and _is_whole(answer):  # a fraction may have been rounded
        return False
    if any(len(word) > 2 for word in _words(answer)):
        return False  # their order counts
    if not is_mathematics(answer) or INCOMPLETE.fullmatch(answer):
        return False
    if theirs and not re.search("[0-9]", candidate):
        return False
    number = re.sub(r"[\s{}]", "", answer)
    if IN_BASE.fullmatch(number):
        return re.sub(r"[\s{}]", "", candidate) in (number, number.partition("_")[0])
    if not _is_comparable(candidate, answer):
        return False
    return [((candidate,), answer)]


def _spell_out(text: str) -> str:
    """Returns a number without separators of thousands, 4.5e33 and 2 > x > 1 as LaTeX."""
    text = AND.sub(",", text.replace(UPRIGHT, " ")).strip()
    text = read_number(text) or text
    text = SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)
    text = MIXED.sub(r"\1\\frac{\2}{\3}", text)
    sides = re.split(r"(>|\\ge(?![A-Za-z]))", text)
    if len(sides) == 5 and not re.search(r"[<,=]|\\le", text):
        flipped = {">": "<", "\\ge": "\\le "}
        return "".join(flipped.get(side, side) for side in reversed(sides))
    return text


def is_mathematics(answer: str) -> bool:
    """Returns whether a reference is mathematics, not a mere label.

    It is a single letter, or has a digit, an operator or a command.
    """
    text = COMMAND.sub(" ", answer)
    if LABEL.search(text) or SPACED.search(answer):
        return False
    if _words(answer) and not re.search(r"[0-9\\]", answer):
        return False  # a hyphen or a bracket in prose
    return bool(OPERATOR.search(answer)) or re.fullmatch(r"\W*[A-Za-z]\W*", text) is not None


def _is_comparable(text: str, answer: str) -> bool:
    """Returns whether a text has the form of one answer that math-verify reads as it is meant."""
    ours = _opening(text)
    theirs = _opening(answer)
    return (
        _is_balanced(text)
        and not INCOMPLETE.fullmatch(text)
        and not set(PLAIN.sub("", text)) - set(answer)
        and not _commands(text) - COMMANDS - _commands(answer)
        and not (SPACED.search(text) or SUBSCRIPTED.search(text))
        and _hidden(text) == _hidden(answer)
        and (not RELATION.search(text) or re.search(r"[\[(<>\\]", answer) is not None)
        # {1, 2} is not (1, 2)
        and ("," not in answer or ours in ("", ",", theirs) or (ours, theirs) == ("{", ","))
        and (_words(text) == _words(answer) or not (_has_letters(text) and _has_letters(answer)))
    )


def _opening(text: str) -> str:
    """Returns the bracket around a text, a comma for a list without one."""
    if len(_split(text, COMMA)) > 1:
        return ","
    match = OPENING.match(text)
    if match is None:
        return ""
    return match[1]


def _commands(text: str) -> set[str]:
    return {command[1:] for command in COMMAND.findall(text)}


def _is_balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"[{}]", COMMAND.sub("", text)):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def _words(text: str) -> Counter[str]:
    return Counter(word for word in WORD.findall(COMMAND.sub(" ", text)) if word not in COMMANDS)


def _hidden(text: str) -> list[str]:
    return HIDDEN.findall(COMMAND.sub(" ", text))


def _has_letters(text: str) -> bool:
    return re.search("[A-Za-z]", COMMAND.sub(" ", text)) is not None


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Splits a text at separators outside all brackets."""
    pieces = []
    start = 0
    depth = 0
    for match in re.finditer(rf"\\?[({{\[]|\\?[)}}\]]|(?P<cut>{separator.pattern})", text):
        if match["cut"] is None:
            depth += 1 if match[0][-1] in "({[" else -1
        elif depth <= 0:
            pieces.append(text[start : match.start()])
            start = match.end()
    return [*pieces, text[start:]]


# --- the judge's process --------------------------------------------------------------------------


def import_math_verify() -> None:
    """Imports math-verify, and fills the caches of its parser for the processes that are forked."""
    judge = make_judge(None)
    for text in (r"\frac{1}{2}", r"x^2 + \sqrt{3}", "17", r"\{1, 2\}"):
        judge([((text,), text)])


def make_judge(context: None) -> Callable[[list[Equality]], float]:
    """Returns ``judge(equalities)``, which is 1 if one of them is true, else 0."""
    import math_verify

    # without its own time limits, which need the process's only alarm
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    from sympy import Add, Basic, Mul, Number, preorder_traversal

    verify = partial(math_verify.verify, timeout_seconds=None, allow_set_relation_comp=True)

    def kind(term: Any) -> Any:
        """Returns what a term has beside its numbers, 1 for a number."""
        value = term
        if isinstance(term, Mul):
            value = Mul(*term.args)
        return value.as_coeff_Mul()[1] if value else term

    def is_left(expression: Any) -> bool:
        """Returns True if a sum in it has like terms or a zero, or a product two numbers.

        The parser evaluates fractions only: 1 - 1/2, 8 + 9, 2 * 9 and pi + pi are left to evaluate.
        """
        if not isinstance(expression, Basic):  # a matrix, or the text of what cannot be parsed
            return any(map(is_left, getattr(expression, "flat", list)()))
        for node in preorder_traversal(expression):
            if isinstance(node, Add) and len({*map(kind, node.args), 0} - {0}) < len(node.args):
                return True
            if (
                isinstance(node, Mul)
                and sum(isinstance(x, Number) and x != -1 for x in node.args) > 1
            ):
                return True
            if node.is_MatAdd:
                return True
        return False

    def is_near(gold: Any, other: Any) -> bool:
        """Returns False for numbers that are only equal as both round to 0, as 1e-34 and 2e-34."""
        if not all(isinstance(value, Basic) and value.is_number for value in (gold, other)):
            return True
        gold, other = (complex(value.doit().evalf()) for value in (gold, other))
        return gold == other or abs(gold - other) <= 1e-4 * abs(gold)

    def is_true(equality: Equality) -> bool:
        texts, answer = equality
        boxed = [f"\\boxed{{{text}}}" for text in (answer, *texts)]
        gold, *parsed = [math_verify.parse(text, parsing_timeout=0) for text in boxed]
        if not all(verify(gold, text) and is_near(gold[0], text[0]) for text in parsed):
            return False
        return is_left(gold[0]) or not is_left(parsed[-1][0])

    return lambda equalities: float(any(map(is_true, equalities)))
