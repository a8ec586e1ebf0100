r"""Where a response's answer is: <answer>, \boxed{}, the last line or the whole text, on texts of every kind."""

from __future__ import annotations

import time
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.schema import AnswerPlace
from megarl.rewards.answers import extract_answer

PLACES: tuple[AnswerPlace, ...] = get_args(AnswerPlace)


@pytest.mark.parametrize(
    ("place", "response", "answer"),
    [
        ("tag", "<answer> 7\n</answer> so", "7"),
        ("tag", "<answer>1</answer> no: <answer>2</answer>", "2"),
        ("tag", "<answer>1</answer> <answer>2", "1"),
        ("tag", "<answer>1</answer></answer>", "1"),
        ("tag", "<answer>in <answer>2</answer>", "2"),
        ("tag", "<answer></answer>", ""),
        ("tag", "<answer>7", None),
        ("tag", "7</answer>", None),
        ("tag", "</answer>7<answer>", None),
        ("tag", "7", None),
        ("tag", "<ANSWER>7</ANSWER>", None),
        ("boxed", r"\boxed{1}, no: \boxed{ x^{2} }", "x^{2}"),
        ("boxed", r"\boxed{{a}{b}} and \boxed{open", "{a}{b}"),
        ("boxed", r"\boxed{1} } \boxed{x + \boxed{2}}", "2"),
        ("boxed", r"\boxed{7} \boxed{ { }", "7"),
        ("boxed", r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        ("boxed", r"\boxed{a \\} b}", r"a \\"),
        ("boxed", r"\boxed{}", ""),
        ("boxed", r"\boxed{1\}", None),
        ("boxed", r"\boxed 7 {7}", "7"),
        ("boxed", "7", None),
        ("last_line", "because\n\n 7 \n\n", "7"),
        ("last_line", "8\r\n7\r\n", "7"),
        ("last_line", "7", "7"),
        ("last_line", "\u96f6\n\u4e03", "\u4e03"),
        ("last_line", " \n\t\n", None),
        ("last_number", "6 + 10 = 16.", "16"),
        ("last_number", "x = -5", "-5"),
        ("last_number", "(7)-5", "5"),
        ("last_number", "about 1,234,567.50 euros", "1234567.50"),
        ("last_number", "1, 2 or 3,4", "4"),
        ("last_number", "seven", None),
        ("last_number", "so 3/7.", "3/7"),
        ("last_number", "so 3 / 7", "3 / 7"),
        ("last_number", "1/10 or 2^10", "2^10"),
        ("last_number", "2.5e3", "2.5e3"),
        ("last_number", "at 12:30.", "12:30"),
        ("last_number", "on 2024-01-05", "2024-01-05"),
        ("last_number", "x_5", None),
        ("last_number", "5 is x_7, H2O or GPT4", "5"),
        ("last_number", r"so $\frac{3}{7}$", r"\frac{3}{7}"),
        ("last_number", r"so \boxed{7}.", "7"),
        ("last_number", r"\(12\,345\)", "12345"),
        ("last_number", "10 000", "10 000"),
        ("last_number", "7 million euros", "7 million"),
        ("last_number", "1 2/3", "1 2/3"),
        ("last_number", r"2 \times 10^{-3}", r"2 \times 10^{-3}"),
        ("last_number", "**7**", "7"),
        ("last_number", "7%", "7%"),
        ("last_number", "it is 7! so", "7!"),
        ("last_number", "it is \u20137", "\u20137"),
        ("last_number", "so - 7", "- 7"),
        ("last_number", "3 - 7", "7"),
        ("last_number", "\u221a7 or \u221a 8", "\u221a 8"),
        ("last_number", r"x = 3 \sqrt 7", r"3 \sqrt 7"),
        ("last_number", "ln 7", "ln 7"),
        ("last_number", "minus 7", "minus 7"),
        ("last_number", "10 choose 7", "10 choose 7"),
        ("last_number", "7\u00b2", "7\u00b2"),
        ("last_number", "7\u03c0", "7\u03c0"),
        ("last_number", r"7 \pi", r"7 \pi"),
        ("last_number", r"{3 \over 7}", r"{3 \over 7}"),
        ("last_number", "7 halves", "7 halves"),
        ("last_number", "7 bn", "7 bn"),
        ("last_number", "7 eggs", "7"),
        ("last_number", "so 7 is right", "7"),
        ("tag", r"<answer>The result: \boxed{7}</answer>", "7"),
        ("tag", "<answer> **$7$** </answer>", "7"),
        ("tag", r"<answer>\boxed{7</answer>", None),
        ("tag", "<answer>$7$ or $8$</answer>", "$7$ or $8$"),
        ("boxed", r"\boxed{\(7\)}", "7"),
        ("last_line", "The result: \\boxed{7}", "7"),
        ("whole", r"so \boxed{7}", r"so \boxed{7}"),
        ("auto", r"\[7\]", "7"),
        ("auto", "[THINK]8[/THINK] 7", "7"),
        ("whole", " to be\nor not ", "to be\nor not"),
        ("whole", "", ""),
        ("auto", "7 ", "7"),
        ("auto", r"so \boxed{7}.", "7"),
        ("auto", r"<answer>7</answer> or \boxed{8}", "7"),
        ("auto", r"\boxed{8} <answer>7", None),
        ("auto", r"\boxed{7", None),
        ("whole", "<think>8</think> 7", "7"),
        ("boxed", r"<think>\boxed{8}</think> 7", None),
        ("tag", "I guess <answer>8</answer></think><answer>7</answer>", "7"),
    ],
)
def test_places(place: AnswerPlace, response: str, answer: str | None) -> None:
    assert extract_answer(response, place) == answer


@pytest.mark.parametrize("place", PLACES)
def test_a_response_that_is_cut_off_while_thinking_has_no_answer(place: AnswerPlace) -> None:
    assert extract_answer("<think> maybe <answer>\\boxed{7}</answer>", place) is None


PIECES = (
    "<answer>",
    "</answer>",
    "\\boxed",
    "\\boxed{",
    "{",
    "}",
    "\\{",
    "\\",
    "<think>",
    "</think>",
    "\n",
    "\u2028",
    "7",
    "\ud800",
)
TEXTS = st.one_of(st.text(max_size=50), st.lists(st.sampled_from(PIECES), max_size=20).map("".join))


@settings(max_examples=500, deadline=None)
@given(TEXTS, st.sampled_from(PLACES))
def test_any_text_gives_a_part_of_itself_or_nothing(text: str, place: AnswerPlace) -> None:
    answer = extract_answer(text, place)
    if place == "last_number":
        text = text.replace(",", "")
    assert answer is None or (answer in text and answer == answer.strip())


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.text(alphabet="0123456789abc+-", min_size=1, max_size=10))
def test_what_comes_before_does_not_matter(before: str, answer: str) -> None:
    before += "</think>"
    for place, end in (
        ("tag", f"<answer>{answer}</answer>"),
        ("boxed", f"\\boxed{{{answer}}}"),
        ("last_line", f"\n{answer}"),
        ("last_number", f"{answer} is 17"),
    ):
        assert extract_answer(before + end, place) == ("17" if place == "last_number" else answer)


@pytest.mark.parametrize(
    "piece",
    [
        "<answer>",
        "</answer>",
        "\\boxed{",
        "{",
        "}",
        "\\",
        "<think>",
        "</think>",
        "\n",
        " ",
        "x",
        "1",
        "1,",
        "-1",
    ],
)
@pytest.mark.parametrize("place", PLACES)
def test_a_megabyte_takes_linear_time(place: AnswerPlace, piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    extract_answer(text, place)
    extract_answer(text + "</answer>" + "}" * 1000, place)
    assert time.process_time() - start < 5
