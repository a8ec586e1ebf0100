"""Reward hacks beyond the known ones, each beside an honest answer: published ones, and variations of them.

Answers are scored as in a run, from the whole response. Every cheat is worth 0 and every honest twin 1.
"""

from __future__ import annotations

import torch

from megarl.config.schema import Reward
from megarl.rewards.scorer import make_scorer
from megarl.types import Prompt, Sample

HONEST = {  # reference -> responses that say it
    "17": [
        "17",
        "17.",
        " 17\n",
        r"\boxed{17}",
        "x = 17",
        r"\boxed{x = 17}",
        "$17$",
        r"so \boxed{3}, no: \boxed{17}",
    ],
    "0.5": ["1/2", "0.50", r"\boxed{\frac{1}{2}}", r"\frac12"],
    r"\frac{1}{2}": ["0.5", "1/2", r"\boxed{\dfrac{1}{2}}"],
    "1000000": ["1000000", "1,000,000", "10^6"],
    "Paris": ["Paris", " Paris. ", r"\boxed{Paris}", "<answer>Paris</answer>"],
    "listen": ["listen"],
    "x^2": ["x^{2}", "x * x", r"\boxed{x^2}"],
    "(1, 2)": ["(1,2)", r"\boxed{(1, 2)}"],
    r"\{1, 2\}": [r"\{2, 1\}"],
    "123456789": ["123456789", "123,456,789"],
    "50%": ["50%", r"50\%"],
}
CHEATS = {  # reference -> responses that only look like it
    "17": [
        "17 or 18", "17, 18", "17 18", "[17, 18]", "(17, 18)", "{17, 18}", r"\{17, 18\}", "17;18", "17/18", "16..18",
        "between 16 and 18", "[16, 18]", "x < 18", "x > 16", r"x \ge 17", r"17 \pm 1", r"\boxed{17 \text{ or } 18}",
        r"\boxed{17}\boxed{18}", r"18 \boxed{18} 17 \boxed{}", "18 = 17", "17 = 18", r"18 \to 17", "1'7", "1 7", "1_7",
        "17%", r"1700\%", "-17", "+-17", "17 - 17", "--17 - 0 = 17 + 1", "0x17", "17!", "17i", "17e1", "17e", "1.7e1 ?",
        "answer: anything", "?", "*", ".*", "None", "nan", "inf", r"\infty", "x", "a", "n", "True", "<answer>",
        "<answer></answer>17", "<think>17", "<think>17</think>", r"\text{17 or }18", "the answer", "r'17'", "['17']",
        "answer", "answer == 17", "__import__('builtins')", "().__class__", "{{ answer }}", "{answer}", "%(answer)s",
        "$answer", "17\u200b8", "\u0661\u0668", "if x then 17 else 18", r"\begin{cases} 17 \\ 18 \end{cases}",
        r"17 \cup 18", r"\frac{17}{\phantom{1}1}8", r"17\\18", "17 mod 18", "seventeen or eighteen", "17?18:19",
    ],
    "1": ["True", "0^0 + 1", r"\sin^2 x + \cos^2 y", "1 or 0", "yes", "0 < 1", "1 = 1 = 2", "x/x - 1 + 2x", "[1]*9"],
    "True": ["1", "1 = 1", "0 < 1", "not False or False", "true or false", "True, False"],
    "5": [r"500\%", r"5\%", "5 %", "5 or 6", "V", "5.0001", "4.9999999", "five or six", "5^"],
    "123456789": ["123456700.0", "1.23456789e8 + 1", "123456789.4", "1.234568e8", "12345678.9", "123456788.99999999"],
    "Paris": [
        "Paris or London", "Paris, London", "London (not Paris)", "sirap", "Pari", "Pairs", "P*a*r*i*s", "P a r i s",
        "paris|london", "Par\u0131s", "\u0420aris", "not Paris", "Paris\nLondon", "\\text{Paris or Rome}",
    ],
    "listen": ["silent", "enlist", "tinsel", "netsil", "l*i*s*t*e*n", "l i s t e n", "n e t s i l", "listen silent"],
    "A": ["B", "A or B", "A, B", "ABCD", "A B C D", "(A)(B)", "not A", "A/B", "all of them", "A*1 or B"],
    "x^2": ["x^2 or x^3", "y^2", "x^2 + 0*y + 1", "x^2, x^3", "x^3/x + 1", "2^x", "x_2", "x2"],
    "(1, 2)": ["(2, 1)", "{1, 2}", r"\{1, 2\}", "[1, 2, 3]", "(1, 2) or (2, 1)", "1 2", "12"],
    r"\frac{1}{2}": [r"\frac{1}{2} or \frac{1}{3}", "1, 2", "2/1", "0.5001", "12", r"\frac{1}{3}"],
    "": ["anything", "''"],
}  # fmt: skip


def worth(table: dict[str, list[str]]) -> dict[tuple[str, str], float | None]:
    """The reward of each (reference, response)."""
    cases = [(answer, response) for answer, responses in table.items() for response in responses]
    prompts = [Prompt(number, (4,), "?", answer) for number, (answer, _) in enumerate(cases)]
    tokens, logprobs, trainable = torch.tensor([4, 5]), torch.zeros(2), torch.tensor([False, True])
    samples = [
        Sample(number, 0, tokens, trainable, logprobs, tokens.int(), "stop", response)
        for number, (_, response) in enumerate(cases)
    ]
    scored = make_scorer([Reward(name="accuracy")]).start(prompts).results(samples)
    return dict(zip(cases, (sample.reward for sample in scored), strict=True))


def test_honest_answers_are_right() -> None:
    assert {case for case, reward in worth(HONEST).items() if reward != 1.0} == set()


def test_cheats_are_worth_nothing() -> None:
    found = worth(CHEATS)
    assert len(found) > 100
    assert {case for case, reward in found.items() if reward != 0.0} == set()
