# ruff: noqa: RUF001 (the signs are meant)
r"""Reads what math-verify does not know: fonts, signs, choices, units and thousands.

    \textbf{(B)}\ 12~\text{km} --plain_latex--> (B) 12 km --read_choice--> B, 12 km
                                                12 km --read_quantity--> Quantity("12", "km")

All of it in time linear in the text. maths.py compares what was read.
"""

import re
import unicodedata
from dataclasses import dataclass

from megarl.rewards.answers import without_marks


def _pairs(text: str) -> dict[str, str]:
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


UPRIGHT = "\f"  # white space that stands where an upright font begins or ends
IGNORED = r"""
left right big Big bigl bigr Bigl Bigr bigg biggl biggr rm bf it displaystyle
textstyle limits ( ) [ ]
"""
SPACES = "quad qquad enspace thinspace space , ; :"
RENAMED = r"""
dfrac \frac tfrac \frac cfrac \frac leq \le geq \ge leqslant \le geqslant \ge neq \ne
lt < gt > ast * lbrace \{ rbrace \} degree ^\circ varnothing \emptyset colon : dbinom \binom
"""
COMMANDS = {
    **dict.fromkeys(IGNORED.split(), ""),
    **dict.fromkeys([*SPACES.split(), " ", "\n"], " "),
    **_pairs(RENAMED),
}
SIGNS = _pairs(r"""
× \times ÷ \div · \cdot ∙ \cdot − - – - ≤ \le ⩽ \le ≥ \ge ⩾ \ge ≠ \ne ≈ \approx ∞ \infty √ \sqrt
∪ \cup ∩ \cap ∈ \in ∅ \emptyset ± \pm ° ^\circ → \to ∠ \angle ⁄ / α \alpha β \beta γ \gamma
θ \theta λ \lambda μ \mu π \pi σ \sigma φ \phi ω \omega Δ \Delta Ω \Omega
""")
SCRIPTS = {
    "^": re.compile("[\u00b2\u00b3\u00b9\u2070\u2071\u2074-\u207f]+"),
    "_": re.compile("[\u2080-\u208e\u2090-\u209c]+"),
}
LATEX = re.compile(
    r"(?P<font>\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt)|[mfh]box|boxed|bm|boldsymbol)\s*\{)"
    r"|\\(?P<name>[A-Za-z]+|.)|(?P<sign>[{}$~])|[^\\{}$~]+|\\",
    re.DOTALL,
)
TOKEN = re.compile(
    r"\^\{?\s?\\circ\s?\}?|\\(?:[A-Za-z]+|.)|[^\W\d_]+|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\S", re.DOTALL
)
UNIT_TOKEN = re.compile(rf"\^\s?\{{?-?[0-9]+\}}?|{TOKEN.pattern}", re.DOTALL)

# names of one unit in each line; what multiplies the value (*) must not be left out
NAMES_OF_UNITS = r"""
mm millimeter millimetre 毫米 мм
cm centimeter centimetre 厘米 см
m meter metre 米 м
km kilometer kilometre 千米 公里 км
inch in
ft foot feet
yd yard
mi mile
mg milligram
g gram gramme gm 克 г
kg kilogram kilo 千克 公斤 кг
t ton tonne
lb pound
oz ounce
mL ml milliliter millilitre 毫升
L l liter litre 升
gal gallon
s sec second 秒
min minute 分钟
h hr hour 小时
day 天
week
month
year yr 年 岁
deg degree 度
rad radian
N newton
J joule
kJ kilojoule
cal calorie
W watt
kW kilowatt
kWh
V volt
A amp ampere
Hz hertz
Pa pascal
K kelvin
mol mole
ohm \Omega
acre
ha hectare
unit
USD $ \$ dollar 美元
cent ¢
EUR € euro
GBP £ \pounds
JPY ¥ yen 日元
CNY yuan 元
INR ₹ Rs rupee
RUB ₽ руб рублей рубля рубль
KRW ₩ won
*% % \% percent pct
*100 hundred
*k thousand k
*M million
*B billion
*T trillion
*12 dozen
*万 万
*亿 亿
"""
UNITS = {name: line.split()[0] for line in NAMES_OF_UNITS.splitlines() for name in line.split()}
COMPOUNDS = _pairs("mph mi/h kmh km/h kph km/h")
POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
# words that change what stands beside them
HIDDEN = re.compile(
    r"""
    \b(?:more|less|fewer|least|most|not|minus|negative|plus|over|under|per|half|halves|third|quarter
    |fifth|sixth|eighth|tenth|hundredth|thousandth|score|pair|gross|times|squared?|cubed?|factorial
    |mod|modulo|percent|hundred|thousand|[mbtr]+illion|dozen)s?\b
    |\b(?:mil|mill[io]\w*|bill[io]\w*|do[czu]\w*en\w*|тысяч\w*|мил[лиар]\w*)\b|[万亿百千兆億]
    """,
    re.IGNORECASE | re.VERBOSE,
)
CURRENCY = r"\\\$|\\pounds|[$€£¥₹₽₩]|USD|EUR|GBP|Rs\.?(?= ?[0-9])"
NUMBER = re.compile(
    rf"([-+]?)\s?({CURRENCY}|)\s?([-+]?)"
    r"((?:[0-9]{1,3}(?:[, ][0-9]{3})+|[0-9]+)(?![0-9])|(?=\.[0-9]))(\.[0-9]*)?(?![0-9])"
)
LAST_UNIT = re.compile(r"(.*[0-9})\s])((?:square |sq |cubic |cu )?[A-Za-z]{2,})", re.DOTALL)
CHOICE = re.compile(
    r"(?:option\s|choice\s)?\s*(?:\(\s?([A-J])\s?\)|([A-J])(?=\s?[.:)]|\Z))[\s.:)]*(.*)", re.DOTALL
)
OTHER_CHOICE = re.compile(
    r"\(\s?[A-J]\s?\)|(?<![A-Za-z])[A-J][.:)]|\A[A-J]\Z|\b(?:or|and|not)\s\(?[A-J](?![A-Za-z])"
    r"|\A(?:or|and|not)\b"
)


def plain_latex(text: str) -> str:
    """Returns a text as LaTeX without fonts, delimiters and spacing, its signs as commands."""
    text = re.sub(r"\\!\s*", "", unicodedata.normalize("NFC", without_marks(text)))
    for script, run in SCRIPTS.items():
        text = run.sub(lambda match, mark=script: f"{mark}{{{_compatible(match[0])}}}", text)
    text = "".join(map(_latex_of, text))
    text = re.sub(r"\\sqrt \s*([0-9.]+|[A-Za-z]|\([^()]*\))", r"\\sqrt{\1}", text)
    if text.count("$") % 2:  # of dollars
        text = re.sub(r"(?<!\\)\$(?=\s?[-+]?[0-9.])", r"\\$", text, count=1)
    pieces = []
    closing = []  # what stands for the braces that are open
    for match in LATEX.finditer(text):
        piece = match[0]
        if match.lastgroup == "name":
            piece = COMMANDS.get(match["name"], piece)
        elif match.lastgroup == "font":
            closing.append(UPRIGHT)
            piece = UPRIGHT
        elif piece == "{":
            closing.append("}")
        elif piece == "}" and closing:
            piece = closing.pop()
        elif match.lastgroup == "sign":
            piece = {"$": "", "~": " "}.get(piece, piece)
        pieces.append(piece)
    text = "".join(pieces) + "{" * len(closing)  # an open brace stays one
    text = re.sub(r"\{([^{}]*)\\choose([^{}]*)\}", r"\\binom{\1}{\2}", text)
    text = re.sub(
        r"\s*\f\s*", UPRIGHT, re.sub(r"[^\S\f]+", " ", re.sub(r"\{([,:])\}", r"\1", text))
    )
    return _without_braces(text.strip().rstrip(".\u3002").rstrip())


def _latex_of(sign: str) -> str:
    """Returns the LaTeX of one character."""
    if sign.isascii():
        return sign
    if sign in SIGNS:
        return SIGNS[sign] + " "
    if unicodedata.decomposition(sign).startswith("<fraction>"):
        above, below = _compatible(sign).split("\u2044")
        return f"\\frac{{{above}}}{{{below}}}"
    return " " if sign.isspace() else sign


def _compatible(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\u2212", "-")


def _without_braces(text: str) -> str:
    """Returns a text without the braces around all of it; those of a list are a set's."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth <= 0 and match.end() < len(text):
            return text
    if depth or not text.startswith("{"):
        return text
    inner = text[1:-1].strip()
    return f"\\{{{inner}\\}}" if "," in inner else inner


def tokens_of(text: str) -> list[str]:
    """Returns the words, numbers, commands and signs of plain LaTeX.

    Words are in lower case, as math-verify compares them; a single letter is a name.
    """
    return [
        token.lower() if len(token) > 1 and token[0] != "\\" else token
        for token in TOKEN.findall(text)
    ]


def read_choice(text: str) -> tuple[str, str]:
    """Returns the letter of a choice, as the B of (B) 12, and its text; both may be empty."""
    match = CHOICE.fullmatch(text)
    if match is None:
        return "", ""
    return match[1] or match[2], match[3].strip()


@dataclass(frozen=True)
class Quantity:
    value: str  # plain LaTeX
    unit: str = ""  # in base units, as h^-1 km^1
    noun: str = ""  # what is counted
    is_upright: bool = False  # the noun is in \text, as units are, or in no Latin letters
    scale: str = ""  # what multiplies the value, as *%^1


def read_number(text: str) -> str | None:
    """Returns a plain number without separators of thousands, None for any other text."""
    match = NUMBER.fullmatch(text)
    if match is None or match[2] or (match[1] and match[3]):
        return None
    return _digits(match)


def _digits(match: re.Match[str]) -> str:
    sign, _, behind_currency, whole, fraction = match.groups("")
    return (sign or behind_currency) + re.sub("[, ]", "", whole) + fraction


def read_quantity(text: str) -> Quantity:
    """Returns a value and its unit, or the text as a value if it ends in no unit."""
    splits = []
    number = NUMBER.match(text)
    if number:
        splits.append((_digits(number), number[2] + text[number.end() :]))
    value, _, unit = text.partition(UPRIGHT)
    splits.append((value, UPRIGHT + unit))
    last = LAST_UNIT.fullmatch(text)
    if last and UNITS.keys() & _singulars(last[2].split()[-1]):
        splits.append((last[1], last[2]))
    for value, unit in splits:
        quantity = _read_unit(value.strip(), unit)
        if quantity:
            return quantity
    return Quantity(text)


def _singulars(word: str) -> list[str]:
    return [word, *(form.removesuffix(end) for form in (word, word.lower()) for end in ("s", "es"))]


def _read_unit(value: str, text: str) -> Quantity | None:
    """Returns a quantity, None if the text behind the value is no unit."""
    powers = {}
    nouns = []
    unit = ""
    sign = 1
    power = 1
    text = text.replace("per cent", "percent")
    for word, replacement in COMPOUNDS.items():
        text = re.sub(rf"\b{word}\b", replacement, text)
    for token in UNIT_TOKEN.findall(text):
        names = [UNITS[name] for name in _singulars(token) if name in UNITS]
        if token in ("/", "per"):
            sign = -1
        elif token.lower() in POWERS:
            power = POWERS[token.lower()]
        elif "\\circ" in token:
            unit = "deg"
            powers[unit] = 1
        elif unit == "deg" and token in ("C", "F"):
            powers = {f"deg{token}": 1}
        elif token.startswith("^") and unit:
            powers[unit] = sign * int(token.strip("^ {}"))
        elif names:
            unit = names[0]
            powers[unit] = sign * power
            power = 1
        elif token.isalpha() and (not token.isascii() or (len(token) > 1 and text[0].isspace())):
            nouns.append(token.lower())
        elif token not in (".", "*", "\\cdot"):
            return None
    noun = " ".join(word.removesuffix("s") for word in nouns)
    is_counted = re.search("[0-9]", value) and re.search(r"\w{3}|[^\x00-\x7f]", noun)
    if not value or not (powers or is_counted):
        return None
    if HIDDEN.search(" ".join(nouns)) or {"or", "and", "than"} & {*nouns}:
        return None
    names = [f"{name}^{count}" for name, count in sorted(powers.items())]
    unit = " ".join(name for name in names if name[0] != "*")
    scale = " ".join(name for name in names if name[0] == "*")
    is_upright = text.startswith(UPRIGHT) or not text.isascii()
    return Quantity(value, unit, noun, is_upright, scale)
