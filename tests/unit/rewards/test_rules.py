"""Rewards that are rules, on right answers and on hostile ones."""

from __future__ import annotations

import time

import pytest

from megarl.rewards.rules import accuracy, even_fraction, final_answer, format_think


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("17", "17", 1.0),
        (" 17.\n", "17", 1.0),
        ("18", "17", 0.0),
        ("1/2", "0.5", 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"first \boxed{3}, no: \boxed{x^{2}}", "x^2", 1.0),
        ("<think>it is 3</think> 4", "3", 0.0),
        ("<think>it is 3</think> <answer>4</answer>", "4", 1.0),
        (r"<think>is it \boxed{3}?</think> 4", "3", 0.0),
        ("(1, 2)", "(1,2)", 1.0),
        ("", "17", 0.0),
        ("banana", "17", 0.0),
    ],
)
def test_accuracy(response, answer, right):
    assert accuracy(response=response, answer=answer) == right


def test_accuracy_asks_the_tasks_own_scorer_about_the_final_answer():
    asked = []

    def score(text: str) -> float:
        asked.append(text)
        return 0.25

    assert accuracy(response="<think>x</think> <answer> 5 </answer>", answer="6", score=score) == 0.25
    assert asked == ["5"]


def test_a_column_named_score_is_not_a_scorer():
    assert accuracy(response="6", answer="6", score=0.25) == 1.0
    assert accuracy(response="5", answer="6", score="high") == 0.0


def test_accuracy_without_an_answer_is_an_error():
    with pytest.raises(ValueError, match="no answer"):
        accuracy(response="5", answer=None)


def test_final_answer_takes_braces_that_balance():
    assert final_answer(r"\boxed{{a}{b}} and \boxed{open") == "{a}{b}"


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>a</think> 5", 1.0),
        (" <think>\na\n</think>\n5\n", 1.0),
        ("5", 0.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think> \n", 0.0),
        ("so <think>a</think> 5", 0.0),
        ("<think>a</think><think>b</think> 5", 0.0),
        ("<think>a 5", 0.0),
        ("</think>a<think> 5", 0.0),
    ],
)
def test_format(response, value):
    assert format_think(response=response) == value


def test_even_fraction():
    assert even_fraction(tokens=[2, 3, 4, 6]) == 0.75
    assert even_fraction(tokens=[]) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{" * 15_000,
        "{" * 50_000 + "}" * 50_000,
        "<answer>" * 13_000,
        "<think>" * 15_000,
        "\\boxed{" + "9" * 100_000 + "}",
        "</think>" * 13_000,
        " " * 50_000 + "<think>x</think>" + " " * 50_000,
        "\x00\ud800\\boxed{\\frac{1}{",
        "1" + "+1" * 50_000,
    ],
)
def test_hostile_texts_are_judged_at_once(response):
    start = time.monotonic()
    assert accuracy(response=response, answer="17") == 0.0
    assert format_think(response=response) == 0.0
    assert time.monotonic() - start < 30


def test_boxed_in_boxed_and_after_a_stray_brace():
    assert final_answer(r"\boxed{1} } \boxed{x + \boxed{2}}") == "2"
    assert final_answer(r"\boxed{7} \boxed{ { }") == "7"
    assert final_answer("<answer>1</answer> <answer>2</answer> <answer>3") == "2"
