"""Compares a final answer with a reference, as text, as numbers and as mathematics.

    equal text or number                                      --> right
    not mathematics, or in a form that misleads the parser    --> wrong
    else                                                      --> parts to verify

math-verify (in its own process: megarl.jail.judging) drops signs it does not know, takes the last
value of what it cannot parse, and reads words as products of letters: 'silent' equals 'listen'. So
it is asked about mathematics only.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable

MAX_CHARS = 2000  # longer answers are only compared as text
NUMBER = re.compile(r"([-+]?)([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.([0-9]*))?\.?")
COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
UNITS = "cm|mm|km|kg|mg|ml|ft|lb|oz|hr"
WORD = re.compile(
    rf"[A-Za-z]{{3,}}|(?<=[\s{{])[A-Za-z]{{2}}(?![A-Za-z])|(?<![A-Za-z])(?:{UNITS})(?![A-Za-z])"
)
# H2O, e4, 2024-01-05, 12:30
LABEL = re.compile(r"[A-Za-z][0-9]|[0-9][-/.][0-9]+[-/.][0-9]|[0-9]:[0-9][0-9]")
SPACED = re.compile(r"[0-9](?:\s|\\[,;:! ])+[0-9]")  # read as a sum: 8 9 as 17
SUBSCRIPTED = re.compile(r"[0-9}]\s*_")  # not read: 17_2 as 17
IN_BASE = re.compile(r"[0-9A-Za-z]+_[0-9]+")
HIDDEN = re.compile(  # not read either: 17 million as 17
    r"\b(?:percent|hundred|thousand|million|billion|trillion|dozen|more|less|least|most"
    r"|not|minus|negative|over|under|per)\b"
    r"|\\(?:text|mathrm|operatorname)\w*\s*\{[^{}]*[0-9]",
    re.IGNORECASE,
)
OPERATOR = re.compile(r"[0-9+*/^=<>|()\[\]{}\\\u2212-]")
NAME = re.compile(
    r"\s*(?:[A-Za-z][A-Za-z ]*|\\[A-Za-z]+|\\(?:text|mathrm)\{[A-Za-z ]*\})"
    r"(?:_\{?\w+\}?)?(?:\(\w\))?\s*"
)
ARITHMETIC = re.compile(r"(?:[0-9\s.,()+*/\u2212-]|\\(?:times|cdot|div|left|right)(?![A-Za-z]))*")
UNDONE = re.compile(r"[0-9)]\s*(?:[-+*\u2212]|\\times|\\cdot|\\div)")
# any other sign must be in the reference as well
PLAIN = re.compile(r"[0-9A-Za-z\s+*/^(){}\[\].,=<>|_\\$!\u2212-]*")
KNOWN = r"""
sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln exp sqrt frac dfrac tfrac cfrac
binom choose max min gcd lcm deg pi cdot cdots ldots dots times div pm mp circ degree infty sum prod
int lim le leq ge geq lt gt in cup cap setminus emptyset varnothing left right big Big bigl bigr
lfloor rfloor lceil rceil overline vec hat text textbf textit mathrm mathbf mathit mathbb
operatorname displaystyle begin end pmatrix bmatrix alpha beta gamma delta epsilon varepsilon zeta
eta theta iota kappa lambda mu nu xi rho sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda
Xi Pi Sigma Phi Psi Omega , ; ! : \\ { } $ %
"""
OPENING = re.compile(r"(?:[\s$]|\\left)*\\?([({\[])")
COMMANDS = {*KNOWN.split(), " "}  # math-verify reads these as they are meant


def compare(candidate: str, answer: str) -> bool | tuple[str, ...]:
    """Compares a candidate with a reference.

    Returns whether they are equal, or the texts that must all equal the reference as mathematics.
    """
    if _normalise(candidate) == _normalise(answer):
        return True
    ours = _number(candidate)
    theirs = _number(answer)
    if ours is not None and theirs is not None:
        if ours == theirs:
            return True
        if not (ours[2] or theirs[2]):  # integers; a fraction may have been rounded
            return False
    if len(candidate) > MAX_CHARS or not is_mathematics(answer):
        return False
    number = re.sub(r"[\s{}$]", "", answer)
    if IN_BASE.fullmatch(number):
        return re.sub(r"[\s{}$]", "", candidate) in (number, number.partition("_")[0])
    if theirs is not None and not re.search("[0-9]", candidate):
        return False
    return parts_to_verify(candidate, answer) or False


def _normalise(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def _number(text: str) -> tuple[str, str, str] | None:
    """Returns the sign and the digits before and after the point, None if it is no plain number.

    The digits are without leading or trailing zeros.
    """
    match = NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    whole = match[2].replace(",", "").lstrip("0")
    fraction = (match[3] or "").rstrip("0")
    is_negative = match[1] == "-" and (whole or fraction)
    return "-" if is_negative else "", whole, fraction


def parts_to_verify(candidate: str, answer: str) -> tuple[str, ...]:
    """Returns the texts that must all equal `answer` as mathematics for the candidate to be right.

    Empty if it is wrong. x = 17 and 10 + 7 = 17 are forms of 17; 18 = 17 and 10 + 7 are not.
    """
    parts = [candidate]
    if "=" not in answer:
        *sides, last = _split_equation(candidate)
        name, is_member, members = last.partition("\\in ")
        if is_member:
            if _number(answer) or not NAME.fullmatch(name):
                return ()
            last = members
        if _number(answer) and ARITHMETIC.fullmatch(last) and UNDONE.search(last):
            return ()
        parts = [*(side for side in sides if not NAME.fullmatch(side)), last]
    if not all(_is_comparable(part, answer) for part in parts):
        return ()
    return tuple(parts)


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
    """Returns whether math-verify can be trusted with a text."""
    return (
        _is_balanced(text)
        and not set(PLAIN.sub("", text)) - set(answer)
        and not _commands(text) - COMMANDS - _commands(answer)
        and not (SPACED.search(text) or SUBSCRIPTED.search(text))
        and HIDDEN.findall(text) == HIDDEN.findall(answer)
        and ("," not in answer or _opening(text) in ("", _opening(answer)))  # {1, 2} is not (1, 2)
        and (_words(text) == _words(answer) or not (_has_letters(text) and _has_letters(answer)))
    )


def _opening(text: str) -> str:
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


def _has_letters(text: str) -> bool:
    return re.search("[A-Za-z]", COMMAND.sub(" ", text)) is not None


def _split_equation(text: str) -> list[str]:
    """Returns the sides of an equation; an equals sign inside braces belongs to a sum."""
    sides = [""]
    depth = 0
    for piece in re.split(r"([{}=])", text):
        depth += (piece == "{") - (piece == "}")
        if piece == "=" and depth == 0:
            sides.append("")
        else:
            sides[-1] += piece
    return sides


# --- the judge's process --------------------------------------------------------------------------


def import_math_verify() -> None:
    """Imports math-verify, and fills the caches of its parser for the processes that are forked."""
    verify = make_judge(None)
    for text in (r"\frac{1}{2}", r"x^2 + \sqrt{3}", "17", r"\{1, 2\}"):
        verify((text,), text)


def make_judge(context: None) -> Callable[[tuple[str, ...], str], float]:
    """Returns ``judge(texts, answer)``, which is 1 if all texts equal the answer, else 0."""
    import math_verify

    # without its own time limits, which need the process's only alarm
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def judge(texts: tuple[str, ...], answer: str) -> float:
        boxed = [f"\\boxed{{{text}}}" for text in (answer, *texts)]
        gold, *parsed = [math_verify.parse(text, parsing_timeout=0) for text in boxed]
        return float(all(math_verify.verify(gold, text, timeout_seconds=None) for text in parsed))

    return judge
