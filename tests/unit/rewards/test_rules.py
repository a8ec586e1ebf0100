"""Rewards that are rules, on right answers and on hostile ones."""

from __future__ import annotations

import time

import pytest

from megarl.jail.judging import JudgePool
from megarl.rewards.answers import extract_answer
from megarl.rewards.interface import Score, ScoreError, ScoreRequest
from megarl.rewards.rules import Accuracy, check_math_verify, even_fraction, format_think


def judge(
    *final_answers: str | None, answer: str | None = "17", timeout_s: float = 30.0, **extra
) -> list[Score]:
    requests = [
        ScoreRequest("", "", "", answer, final_answer=text, extra=extra) for text in final_answers
    ]
    return Accuracy(timeout_s)(requests)


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
    assert judge(extract_answer(response, "auto"), answer=answer) == [Score(right)]


def test_a_users_scorer_is_asked_about_the_final_answer():
    assert judge("5", "7", score={"5": 0.25}.__getitem__)[0] == Score(0.25)
    assert judge("7", score={"5": 0.25}.__getitem__)[0].value is None, "the user's own error"


def test_a_users_scorer_that_hangs_is_stopped():
    def hangs(text):
        time.sleep(30 if text == "5" else 0)
        return 1.0

    late, other = judge("5", "7", timeout_s=0.2, score=hangs)
    assert late == Score(None, "timeout", "took longer than 0.2 s") and other == Score(1.0)


def test_without_a_final_answer_no_judge_is_asked():
    score, right = judge(None, "None", answer="None", score=lambda text: 1.0)
    assert (score.value, score.cause) == (0.0, "no_answer") and right.value == 1.0


def test_a_column_named_score_is_not_a_scorer():
    assert judge("6", answer="6", score=0.25) == [Score(1.0)]
    assert judge("5", answer="6", score="high") == [Score(0.0)]


def test_accuracy_without_an_answer_is_an_error():
    (score,) = judge("5", answer=None)
    assert score.value is None and "no answer" in score.detail


def test_references_that_are_no_text():
    right, wrong = judge("0.0000325", "3.25", answer=0.0000325)
    assert (right, wrong) == (Score(1.0), Score(0.0))
    assert judge("True", "no", answer=True) == [Score(1.0), Score(0.0)]
    assert judge("b", "2/1", "c", answer=["b", 2]) == [Score(1.0), Score(1.0), Score(0.0)]
    for missing in (float("nan"), [], {"a": 1}):
        (score,) = judge("nan", answer=missing)
        assert (score.value, score.cause) == (None, "error")
        with pytest.raises(ScoreError):
            Accuracy().check(missing, {})
    Accuracy().check(None, {"score": float})
    Accuracy().check("5", {})


def test_a_parser_under_which_math_verify_misreads_is_refused(monkeypatch):
    check_math_verify.__wrapped__()
    monkeypatch.setattr("megarl.rewards.rules.version", lambda package: "4.9.3")
    check_math_verify.__wrapped__()  # it is tried, and reads right
    pool = JudgePool("megarl.rewards.maths:no_such_judge")
    monkeypatch.setattr("megarl.rewards.rules.MATHS", pool)
    with pytest.raises(ValueError, match=r"4\.9\.3.*pip install antlr4-python3-runtime==4\.13\.2"):
        check_math_verify.__wrapped__()


SLOW = [
    "9^{9^{9^{9^9}}}",
    "99999999!",
    r"\sum_{k=1}^{1000000000} \frac{1}{k}",
    "{" * 999 + "17" + "}" * 999,
    "(10^9)!",
    r"\frac{1}{" * 180 + "2" + "}" * 180,
    r"\int_0^1 \sin(x^2) \exp(x^3) dx",
    r"\sqrt{" * 280 + "17" + "}" * 280,
    r"\prod_{k=1}^{10^8} k",
    "1" * 1999,
    "2^{2^{2^{2^{2^2}}}}",
    "9**9**9**9**9",
]


@pytest.mark.parametrize(
    "text", [*SLOW[:5], "9" * 300_000, pytest.param(SLOW[5:], marks=pytest.mark.long)]
)
def test_slow_mathematics_is_worth_0_and_delays_no_other(text):
    texts = [text] if isinstance(text, str) else text
    first, *slow, last = judge(r"\frac{34}{2}", *texts, "x = 17", timeout_s=1.0)
    assert (first, last) == (Score(1.0), Score(1.0))
    assert all(
        score.value == 0.0 and score.cause in ("", "timeout", "memory", "raised", "crashed")
        for score in slow
    )


def test_a_text_that_ends_its_judge_is_counted():
    right, slow = judge("355687428096000", "99999999!", answer="17!", timeout_s=0.5)
    assert right == Score(1.0) and (slow.value, slow.cause) == (0.0, "timeout")
    assert slow.detail == "its judge ended with status -27 of 0.5 CPU seconds"


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
        "0" * 100_000 + "x",
        "1." + "0" * 100_000 + "x",
        "1" + ",000" * 30_000 + "x",
        "5 " + "m . * " * 320 + "x",
        "\\text{m}" * 240 + "!",
        "5 " + "m  " * 600 + "?",
    ],
)
def test_hostile_texts_are_judged_at_once(response):
    start = time.monotonic()
    assert judge(extract_answer(response, "auto"))[0].value == 0.0
    assert format_think(response=response) == 0.0
    assert time.monotonic() - start < 30
