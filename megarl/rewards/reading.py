# ruff: noqa: RUF001 (these signs are intended)
r"""Parses what math-verify does not read: fonts, signs, choices, units, thousands separators.

    \textbf{(B)}\ 12~\text{km} --plain_latex--> (B) 12 km --CHOICE-->      B, 12 km
                                                12 km --read_quantity--> 12, km^1

maths.py compares the results. It only passes texts of up to MAX_CHARS characters.
"""

import re
import unicodedata

from megarl.rewards.answers import MAX_MARKS, without_marks

IGNORED = r"""
\left \right \big \Big \bigl \bigr \Bigl \Bigr \bigg \biggl \biggr \rm \bf \it \displaystyle
\textstyle \limits \( \) \[ \] $
"""
SPACES = r"\quad \qquad \enspace \thinspace \space \, \; \: ~"
RENAMED = r"""
\dfrac \frac \tfrac \frac \cfrac \frac \dbinom \binom \leq \le \geq \ge
\leqslant \le \geqslant \ge \neq \ne \lt < \gt > \ast * \lbrace \{ \rbrace \} \degree ^\circ
\varnothing \emptyset \colon : percent % pct % mph mi/h kmh km/h kph km/h
× \times ÷ \div · \cdot ∙ \cdot − - – - ≤ \le ⩽ \le ≥ \ge ⩾ \ge ≠ \ne ≈ \approx ∞ \infty √ \sqrt
∪ \cup ∩ \cap ∈ \in ∅ \emptyset ± \pm ° ^\circ → \to ∠ \angle ⁄ / α \alpha β \beta γ \gamma
θ \theta λ \lambda μ \mu π \pi σ \sigma φ \phi ω \omega Δ \Delta Ω \Omega
½ \frac{1}{2} ⅓ \frac{1}{3} ⅔ \frac{2}{3} ¼ \frac{1}{4} ¾ \frac{3}{4} ⅕ \frac{1}{5} ⅖ \frac{2}{5}
⅗ \frac{3}{5} ⅘ \frac{4}{5} ⅙ \frac{1}{6} ⅚ \frac{5}{6} ⅛ \frac{1}{8} ⅜ \frac{3}{8} ⅝ \frac{5}{8}
⅞ \frac{7}{8} ⅑ \frac{1}{9} ⅒ \frac{1}{10}
（ ( ） ) ， , 、 , ； ; ： : ％ % ＝ = ＋ + － - ＞ > ＜ <
"""
SYNONYMS = dict.fromkeys(IGNORED.split(), "") | dict.fromkeys([*SPACES.split(), "\\ ", "\\\n"], " ")
SYNONYMS |= {name: f"{command} " for name, command in re.findall(r"(\S+)\s+(\S+)", RENAMED)}
SCRIPTS = {
    "^": "[\u00b2\u00b3\u00b9\u2070\u2071\u2074-\u207f]+",
    "_": "[\u2080-\u208e\u2090-\u209c]+",
}
BALANCED = "[^{}]*+"
for _ in range(12):
    BALANCED = rf"(?:[^{{}}]|\{{{BALANCED}\}})*+"
UPRIGHT = "\f"  # white space that marks where an upright font begins or ends
FONT = re.compile(
    rf"\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt)|[mfh]box|boxed|bm|boldsymbol|underline)\s*"
    rf"\{{({BALANCED})\}}"
)
WORD = re.compile(r"\\?[A-Za-z]+|\\.|.", re.DOTALL)
TOKEN = re.compile(
    r"\^\{?\s?\\circ\s?\}?|\\(?:[A-Za-z]+|.)|[^\W\d_]+|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\S", re.DOTALL
)

# Each line has the names of one unit. Answers must not omit multipliers (*) and counted nouns (#).
NAMES_OF_UNITS = r"""
mm millimeter millimetre 毫米 мм
平方米
平方厘米
平方千米
立方米
立方厘米
dm decimeter decimetre 分米
cm centimeter centimetre 厘米 см
m meter metre metro 米 м
km kilometer kilometre 千米 公里 км
inch in
ft foot feet
yd yard
mi mile
mg milligram
g gram gramme gm 克 г
kg kilogram kilo 千克 公斤 кг
t ton tonne 吨
lb pound
oz ounce
mL ml milliliter millilitre 毫升
L l liter litre 升
gal gallon
s sec second 秒
ms millisecond
min minute 分钟
h hr hour hora 小时 时
day 天 日
week 周 星期
month 个月 月
year yr año 年 岁
deg degree \circ 度
degC \circC
degF \circF
rad radian
N newton
J joule
kJ kilojoule
eV
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
unit 个
种
只
本
棵
次
条
张
件
块
辆
支
朵
颗
页
组
枝
头
台
根
道
套
瓶
盒
箱
袋
people person 人
USD $ \$ dollar 美元
cent ¢
EUR € euro
GBP £ \pounds
JPY ¥ yen 日元
CNY yuan 元
INR ₹ Rs rupee
RUB ₽ руб рублей рубля рубль
KRW ₩ won
*% % \%
*100 hundred
*k thousand k
*M million M
*B billion B
*T trillion
*万 万
*亿 亿
"""
COUNTED = """
adult animal apple apricot bag ball balloon banana bar basket bead bean bear bed bee berry bicycle
bike bill bird block boat book bottle bowl box boy branch brick brother bucket bug building bus
button cabinet cake camel can candies candle candy car card carrot cartoon cat chair cherries cherry
chicken child children chocolate class coin color colour cookie corner cow crayon cup customer dog
doll door dot dress duck edge egg employee envelope face factor families family fish flavor flies
flower fly friend frog fruit game gift girl glass goat grape group guest hat hen horse house
invitation item jar jelly kid lamp leaf leaves lemon letter line lion loaf loaves lollipop man
marble match meal member men mice monkey mouse muffin nail necklace notebook nut orange orchid page
paper parties party passenger path peach peaches pear pen pencil pennies penny pie piece pig pizza
plant plate player point potato potatoes present prize problem puppies puppy puzzle question rabbit
ribbon ring room rose row seashell seat seed sheep sheet shell shirt shoe shot sibling sister slice
snack soldier solution spider spoon stair stamp star step sticker stone stories story straw
strawberries strawberry student sweet table teacher team term test ticket tile tire tomato tomatoes
toy train tree triangle trip truck vase vehicle vertex vertices video visitor vote wallet watch way
whale wheel window woman women word worker zebra
"""
UNITS = {
    f"{name}{end}": line.split()[0]
    for line in NAMES_OF_UNITS.splitlines() + [f"#{noun} {noun}" for noun in COUNTED.split()]
    for name in line.split()
    for end in ("", "s", "es")
}
POWERS = dict(re.findall(r"(\w+) (\d)", "square 2 sq 2 cubic 3 cu 3"))
NAMES = "|".join(map(re.escape, sorted(UNITS, key=len, reverse=True)))
BETWEEN = r"(?:[\s.*]|\\cdot)*+"
UNIT = re.compile(
    rf"(?P<per>/|per\b(?! cent))?{BETWEEN}(?P<kind>square|sq|cubic|cu)?{BETWEEN}(?<![^\W\d_])"
    rf"(?P<name>{NAMES})(?![^\W\d_]){BETWEEN}(?:\^\s?\{{?(?P<power>-?[0-9])\}}?)?{BETWEEN}"
)
NUMBER = (
    r"[-+]?\s?(?:(?:[0-9]{1,3}(?:[, ][0-9]{3})+|[0-9]+)(?![0-9])|(?=\.[0-9]))(?:\.[0-9]*)?(?![0-9])"
)
# after anything but a number, a single letter is a factor, not a unit, except in an upright font
QUANTITY = re.compile(
    rf"({NUMBER}|.{{1,200}}?(?=[\f%]|\\(?:%|circ)|(?<=[0-9}})\s])(?![A-Za-z](?![A-Za-z]))))"
    rf"\s*+((?:{UNIT.pattern})++)",
    re.DOTALL,
)
CURRENCY = r"\\\$|\\pounds|[$€£¥₹₽₩]|USD|EUR|GBP|Rs\.?(?= ?[0-9])"
# groups for (B) 12: B and 12; without a letter, the second group has the whole text
CHOICE = re.compile(
    r"\A(?:(?:(?i:option|choice)\s|选项?)?\s*\(?\s?([A-J])\s?(?:[.:)]|\Z)[\s.:)]*)?(.*?)\s*\Z",
    re.DOTALL,
)
OTHER_CHOICE = re.compile(
    r"\(\s?[A-J]\s?\)|(?<![A-Za-z])[A-J][.:)]|\A[A-J]\Z|\b(?:or|and|not)\s\(?[A-J](?![A-Za-z])"
    r"|\A(?:or|and|not)\b"
)


def plain_latex(text: str) -> str:
    """Returns a text as LaTeX without fonts, delimiters and spacing, with signs as commands."""
    text = unicodedata.normalize("NFC", without_marks(text.strip().rstrip(".\u3002")))
    text = re.sub(r"\\!\s*", "", text)
    text = re.sub(r"\{([^{}]*)\\choose([^{}]*)\}", r"\\binom{\1}{\2}", text)
    text = re.sub(r"\{([^{}]*)\\over(?![a-z])([^{}]*)\}", r"\\frac{\1}{\2}", text)
    for mark, script in SCRIPTS.items():
        text = re.sub(
            script,
            lambda run, mark=mark: f"{mark}{{{unicodedata.normalize('NFKC', run[0])}}}",
            text,
        )
    for _ in range(MAX_MARKS):
        text = FONT.sub(rf"{UPRIGHT}\1{UPRIGHT}", text)
    # a single $ is the currency
    text = re.sub(r"\A([^$]*)(?<!\\)\$(\s?[-+]?[0-9.][^$]*)\Z", r"\1\\$\2", text)
    text = WORD.sub(lambda match: SYNONYMS.get(match[0], match[0]), text)
    text = re.sub(r"\\sqrt\s*([0-9.]+|[A-Za-z]|\([^()]*\))", r"\\sqrt{\1}", text)
    text = re.sub(r"\{([,:]|-(?=\}[0-9]))\}", r"\1", re.sub(r"[^\S\f]+", " ", text))
    text = text.strip().rstrip(".\u3002").rstrip()
    text = re.sub(rf"\A\{{(?=.*,)({BALANCED})\}}\Z", r"\\{\1\\}", text)
    return re.sub(rf"\A\{{\s*({BALANCED})\}}\Z", r"\1", text)


def tokens_of(text: str) -> list[str]:
    """Returns the words, numbers, commands and signs of plain LaTeX.

    Words are in lower case, as math-verify compares them; a single letter, a name, keeps its case.
    """
    return [
        token.lower() if len(token) > 1 and token[0] != "\\" else token
        for token in TOKEN.findall(text)
    ]


def read_number(text: str) -> str | None:
    """Returns a plain number without thousands separators, or None for any other text."""
    if re.fullmatch(NUMBER, text) is None:
        return None
    return re.sub("[, ]", "", text)


def read_quantity(text: str) -> tuple[str, str, str]:
    """Returns (value, unit, multiplier), for example ("5", "h^-1 km^1", "") for 5 km/h.

    The unit of a counted noun begins with #. If a text does not end in a unit, the whole text is
    the value.
    """
    degrees = re.sub(r"\^\{?\s?\\circ\s?\}?\s*", r"\\circ", text)
    degrees = re.sub(rf"\A([-+]?)\s?({CURRENCY})\s?({NUMBER})", r"\1\3\2", degrees)
    match = QUANTITY.fullmatch(degrees) or QUANTITY.fullmatch(degrees.lower())
    if match is None:
        return text, "", ""
    names = []
    for unit in UNIT.finditer(match[2]):
        sign = "-" * bool(unit["per"])
        power = unit["power"] or POWERS.get(unit["kind"], 1)
        names.append(f"{UNITS[unit['name']]}^{sign}{power}")
    scale = [name for name in names if name[0] == "*"]
    unit = sorted({*names} - {*scale})
    return match[1].strip(), " ".join(unit), " ".join(scale)
