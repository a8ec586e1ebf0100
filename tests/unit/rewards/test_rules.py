"""Rewards that are rules, on right answers and on hostile ones."""

from __future__ import annotations

import time

import pytest

from megarl.rewards.answers import extract_answer
from megarl.rewards.rules import accuracy, even_fraction, format_think


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
    assert accuracy(final_answer=extract_answer(response, "auto"), answer=answer).value == right


def test_accuracy_asks_the_tasks_own_scorer_about_the_final_answer():
    assert accuracy(final_answer="5", answer="6", score={"5": 0.25}.__getitem__).value == 0.25


def test_without_a_final_answer_no_judge_is_asked():
    score = accuracy(final_answer=None, answer="None", score=lambda text: 1.0)
    assert (score.value, score.cause) == (0.0, "no_answer")


def test_a_column_named_score_is_not_a_scorer():
    assert accuracy(final_answer="6", answer="6", score=0.25).value == 1.0
    assert accuracy(final_answer="5", answer="6", score="high").value == 0.0


def test_accuracy_without_an_answer_is_an_error():
    with pytest.raises(ValueError, match="no answer"):
        accuracy(final_answer="5", answer=None)


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
    assert accuracy(final_answer=extract_answer(response, "auto"), answer="17").value == 0.0
    assert format_think(response=response) == 0.0
    assert time.monotonic() - start < 30
