"""What counts as equal to a reference: forms of the same value do, what only misleads the parser does not."""

from __future__ import annotations

import random
import string

import pytest

from megarl.rewards.interface import ScoreRequest
from megarl.rewards.maths import compare, is_mathematics
from megarl.rewards.rules import Accuracy

RIGHT = {  # reference: forms of it
    "17": [
        *(
            "17",
            "17.",
            "+17",
            "017",
            "17.0",
            r"$17$",
            r"\$17",
            "{17}",
            "-(-17)",
            "|17|",
            r"\frac{17}{1}",
            r"\frac{34}2",
        ),
        *(
            "x=17",
            "x = 17",
            "x_1 = 17",
            r"\text{Total cost} = 17",
            "Total = 17",
            "17=17",
            "10+7=17",
            "5 + 12 = 17",
        ),
        *(
            "17 cm",
            r"17\text{ dollars}",
            "17 apples",
            "17^\\circ",
            r"1.7\times 10^1",
            r"\frac{51}{3}",
        ),
    ],
    "1234": ["1,234", "1234.00", r"1{,}234"],
    "1,234": ["1234"],
    "-17": ["\u221217", "- 17"],
    "0.5": ["1/2", r"\frac12", r"\dfrac{1}{2}", ".5", "0.50"],
    "1/3": ["0.333333", r"\frac{2}{6}"],
    "1024": ["2^{10}"],
    "2^{10}": ["1024"],
    "5 cm": ["5", "5cm", "5 cm", r"5\text{ cm}"],
    "50%": ["50%", r"50\%", "50", "0.5"],
    "x=17": ["17", "x = 17"],
    "x^2": [r"x^{2}", "x*x", "y = x^2", "f(x) = x^2"],
    "2xy + 3": ["3 + 2yx", "3+2 x y"],
    "x^2+y^2=4": ["y^2+x^2=4", "4 = x^2 + y^2"],
    r"\frac{\pi}{4}": [r"\pi/4", r"0.25\pi"],
    "3/2": [r"1\frac{1}{2}", r"1 \frac12", "1.5"],
    "(1, 2)": ["(1,2)", "1, 2", r"\left(1, 2\right)"],
    r"\{1, 2\}": ["1, 2", "2, 1", r"\{2,1\}", "1 or 2", "1 and 2"],
    "[1,2]": [r"x \in [1,2]", r"\left[1,2\right]"],
    "x > 2": ["2 < x", "x>2"],
    "B": ["(B)", r"\text{B}", "$B$", "B."],
    "12 cats": ["12 cats", "12  cats"],
    "listen": [" listen ", "listen."],
    "1'7": ["1'7"],
    "1 2 3": ["1 2 3", " 1  2 3"],
    "101_2": ["101_2", "101_{2}", "$101_{2}$", "101"],
    "17 million": ["17 million", "17  million."],
    "true": ["True"],  # words of several letters are one to math-verify whatever their case
    "x_1 + 2": ["2 + x_1", "2+x_{1}"],
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": [r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"],
}
WRONG = {
    "17": [
        *(
            "18",
            "-17",
            "1 7",
            "17 18",
            "1'7",
            "1_7",
            "17_2",
            "17_{10}",
            "0x11",
            "17!",
            "17?",
            "#17",
            "not 17",
            "17;18",
        ),
        *(
            r"17\%",
            "1700%",
            "18=17",
            "x+1=17",
            "2x=34",
            "18 = 17 = 17",
            r"x \to 17",
            r"18 \to 17",
            r"18 \approx 17",
        ),
        *(
            r"16 \mid 17",
            r"16 \bmod 17",
            r"16 \neq 17",
            "x>17",
            "x<17",
            r"x \ne 17",
            r"\pm 17",
            "17 or 18",
            "18 or 17",
        ),
        *(
            "17, 18",
            "18, 17",
            r"\{17, 18\}",
            "[17, 18]",
            "17 and 18",
            r"17 \text{ or } 18",
            "17\n18",
            "18\n17",
            "17~18",
        ),
        *(
            "x=17, y=18",
            "x=18, y=17",
            r"17\quad 18",
            r"17\\18",
            "17&18",
            r"\boxed{18}17",
            r"18}\boxed{17",
            "18} 17",
        ),
        *(
            "8 + 9",
            "8+9",
            "8 9",
            r"8\,9",
            r"8\ 9",
            r"8\;9",
            "8\n9",
            r"8 \times 2 + 1",
            "(8)+(9)",
            "34*0.5",
            "20 - 3",
            "17+0i",
            r"\sqrt{289}",
            "2^4+1",
            "17 (approximately) 18",
            "17 apples or 18",
        ),
        *(
            "\uff11\uff17",
            "1\u200b7",
            "\u0661\u0667",
            "1\u20637",
            "\u202e71",
            "\u00b9\u2077",
            "seventeen",
            "{17",
            "17}",
        ),
        *(
            "123456789",
            "17.5",
            "1.7",
            "17e0",
            "",
            "x",
            "\\",
            "$",
            "\\boxed{",
            "17 17",
            "NaN",
            "True",
        ),
    ],
    "17.0": [
        "17 million",
        "17 percent",
        r"17\text{ million}",
        r"17\text{ or more}",
        r"17\text{18}",
        r"17 \mathrm{e3}",
    ],
    "17.00": [
        "18 \\in 17",
        "x \\in 17",
        r"\text{not }17",
        r"\text{minus }17",
        "17 dozen",
        "less than 17",
        "17k",
        "17 more",
        "17 less",
        "1 .7",
    ],
    "1 2 3": ["6", "3 2 1", "1+2+3", "1 5", "123"],
    "101_2": ["101_3", "1012", "5", "101_{8}"],
    "17 million": ["17", "17 billion", "17 thousand"],
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": [
        r"\begin{pmatrix}1&2\\4&3\end{pmatrix}",
        "1&2",
    ],
    "5": [r"5\%", r"500\%", "500%", "5 %"],
    "22": ["2\u00b2"],
    "123456789": ["123456788", "123456700", "1.23456789"],
    "50%": ["5000%", "5%", "5000"],
    "x=17": ["y=17", "18=17", "x=18"],
    "5 cm": ["5 kg", "6 cm", r"5\text{ kg}", "5kg"],
    "12 cats": ["12 acts", "12 c a t s", r"\text{12 acts}", "12", "21 cats"],
    "x^2+y^2=4": ["4", "18=4", "x^2=4"],
    "2024-01-05": ["2018", "2024-05-01", "2024-1-5", "2024 - 6"],
    "12:30": ["0.4", "2/5", "24:60"],
    "H2O": ["OH2", "2HO", "HO2"],
    "e4": ["4e", "10.8731"],
    "Jean-Paul": ["Paul-Jean", "P a u l - J e a n", "-a e J l n P u"],
    "listen": ["silent", "nestli", "tinsel", "l i s t e n", "e*i*l*n*s*t"],
    "true": ["false", "untrue"],
    "(1, 2)": ["(2, 1)", "2, 1", "1 2", "3"],
    "3": ["1 2", "1 2/1 2", "1 1 1"],
    "B": ["A", "A or B", "A, B", "AB"],
}
CASES = [
    (text, answer, value)
    for value, table in ((1.0, RIGHT), (0.0, WRONG))
    for answer in table
    for text in table[answer]
]


@pytest.fixture(scope="module")
def scores() -> dict[tuple[str, str], float | None]:
    requests = [ScoreRequest("", "", "", answer, final_answer=text) for text, answer, _ in CASES]
    return dict(
        zip(
            [case[:2] for case in CASES],
            [score.value for score in Accuracy(30.0)(requests)],
            strict=True,
        )
    )


@pytest.mark.parametrize(("text", "answer", "value"), CASES)
def test_forms_of_an_answer(scores, text, answer, value):
    assert scores[text, answer] == value


def test_letters_of_a_word_in_another_order_are_another_word():
    draw = random.Random(0)
    words = [
        "".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(200)
    ]
    others = [
        (other, word)
        for word in words
        for other in ("".join(sorted(word)), word[::-1])
        if other != word
    ]
    assert not any(compare(other, word) for other, word in others)


SHOTGUNS = [
    *(
        "0,1,2,3,4,5,6,7,8,9",
        "0 or 1 or 2 or 3 or 4",
        "{0,1,2,3,4,5,6,7,8,9}",
        "[0,9]",
        "(0,9)",
        "0 1 2 3 4 5 6 7 8 9",
    ),
    *(
        "0;1;2;3;4;5;6;7;8;9",
        "0=1=2=3=4=5=6=7=8=9",
        r"\boxed{0}\boxed{1}\boxed{2}",
        r"0\to1\to2\to3",
        "x=0, x=1, x=2",
    ),
    *(
        r"\pm 3",
        r"0\text{ or }1",
        "0/1/2/3",
        "0|1|2|3",
        "0\n1\n2\n3",
        r"x \in [0,9]",
        r"0 \lor 1 \lor 2",
        "0123456789",
    ),
]


@pytest.mark.parametrize("shotgun", SHOTGUNS)
def test_no_text_passes_for_several_answers(shotgun):
    requests = [ScoreRequest("", "", "", str(answer), final_answer=shotgun) for answer in range(10)]
    assert sum(score.value or 0.0 for score in Accuracy(30.0)(requests)) <= 1


@pytest.mark.parametrize(
    "answer", ["listen", "yes", "New York", "Jean-Paul", "H2O", "e4", "12:30", "2024-01-05"]
)
def test_what_is_not_mathematics(answer):
    assert not is_mathematics(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "17",
        "x",
        "(B)",
        "x+y",
        r"\pi",
        "2xy",
        "12 km",
        r"2\cdot 3",
        "x^2 = 4",
        r"\text{B}",
        "(1, 2)",
    ],
)
def test_what_is_mathematics(answer):
    assert is_mathematics(answer)


def test_numbers_and_texts_need_no_judge():
    assert all(
        isinstance(compare(text, "17"), bool)
        for text in ("17", "18", "17.0", "1,700", "banana", "seventeen?")
    )
