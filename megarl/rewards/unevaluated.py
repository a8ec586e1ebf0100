r"""Recognises an expression that is left to evaluate: 8 + 9, 1 - \frac{1}{2}, 2 \times 9, \pi + \pi.

A sum is, if two of its terms are of one kind (numbers, or multiples of the same) or one is 0; a
product is, if two of its factors are numbers. 2 - \sqrt{3}, 3 + 4i, 3 \times 10^8, x^2 + 2x and the
mixed number 1\frac{1}{2} are not.
"""

import re

MATRIX = re.compile(r"\\begin\{(\w*)\}(.*?)\\end\{\1\}", re.DOTALL)
COMMAND = re.compile(r"\\([A-Za-z]+|[^{}])")
MEANING = {  # of a command: a separator, a product, a sum, nothing
    **dict.fromkeys("le ge ne in cup cap setminus \\".split(), ","),
    **dict.fromkeys("times cdot div".split(), "*"),
    **dict.fromkeys(["pm", "mp"], "+"),
    **dict.fromkeys(["%", "$"], ""),
    **{"frac": r"\frac", "circ": "°"},
}
BARE = r"([^(){}\[\]]*?)"
GROUP = re.compile(rf"\\frac\{{{BARE}\}}\{{{BARE}\}}|(\\?[({{\[]){BARE}\\?[)}}\]]")
NUMBER = re.compile(r"/?(?<![\^_.0-9])[0-9.]+(?![0-9.]|\^)")
PRODUCT = re.compile(r"(?<![\^_.0-9/])[0-9.]+\*[0-9.]+(?![0-9.]|\^)")
SEPARATOR = re.compile(r"[,;&=<>:|]|and|or")


def is_unevaluated(text: str) -> bool:
    signs = {}
    found = []

    def sign_of(part: str) -> str:
        """Returns a sign that stands for a part of the text."""
        return signs.setdefault(part, chr(0xE000 + len(signs)))

    def command(match: re.Match[str]) -> str:
        return MEANING.get(match[1]) if match[1] in MEANING else sign_of(match[0])

    def group(match: re.Match[str]) -> str:
        above, below, bracket, content = match.groups()
        if bracket is None:
            found.extend(map(_has_like_terms, (above, below)))
            if not _is_number(below):
                return f"{'' if _is_number(above) else sign_of(above)}/{sign_of(below)}"
            return above if len(_terms(above)) == 1 else sign_of(above)
        found.append(_has_like_terms(content))
        start, end = match.span()
        before = match.string[max(start - 1, 0) : start] or ","
        after = match.string[end : end + 1] or ","
        if re.search("[,;]", content):
            return sign_of(",")
        if bracket == "(" and before in "+-,=" and after in "+-,=":
            return content
        if bracket == "(" and _is_number(content) and before not in "^_":
            return "*" + content
        if bracket == "{" and _is_number(content):
            return content
        return sign_of(content)

    text = COMMAND.sub(command, MATRIX.sub(r"(\2,)", text))
    text = re.sub(r"\^?\{?°\}?|[\s%$]", "", text)
    text = re.sub(r"\\frac([0-9])([0-9])", r"\\frac{\1}{\2}", text)
    count = 1
    while count:
        text, count = GROUP.subn(group, text)
    return any([*found, _has_like_terms(text)])


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?[0-9.]+(?:/[0-9.]+)?", text) is not None


def _terms(text: str) -> list[str]:
    return [term for term in re.split("[+-]", text) if term]


def _has_like_terms(text: str) -> bool:
    for expression in SEPARATOR.split(text):
        terms = _terms(expression)
        kinds = {_kind(term) for term in terms}
        has_zero = any(not term.strip("0.") for term in terms)
        if len(kinds) < len(terms) or (has_zero and len(terms) > 1) or PRODUCT.search(expression):
            return True
    return False


def _kind(term: str) -> str:
    """Returns what a term has beside its numbers; those behind a command are part of it."""
    numbers, command, rest = re.fullmatch("([^\ue000-\uf8ff]*)(.?)(.*)", term, re.DOTALL).groups()
    return NUMBER.sub("", numbers).replace("*", "") + command + rest
