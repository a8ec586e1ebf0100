"""Rewards that are rules, and how a reward's name is found."""

from __future__ import annotations

import re

import pytest

from megarl.config.schema import Reward
from megarl.rewards.rules import accuracy, check_rewards, even_fraction, final_answer, format_think, reward_function


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
    ("name", "says"),
    [
        ("acuracy", "did you mean accuracy"),
        ("zzz", "there are accuracy, format"),
        ("https://rewards.example/score", "is a URL"),
        ("no_such.module:f", "cannot be imported"),
        ("megarl.rewards.rules:nothing", "has no 'nothing'"),
        ("megarl.rewards.rules:BUILT_IN", "not a function"),
        (":f", "write package.module:function"),
    ],
)
def test_a_name_that_is_not_found(name, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        check_rewards([Reward(name=name)])


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("accuracy", {"strict": True}, "name='accuracy' has no option 'strict'; it takes none; remove it"),
        ("accuracy", {"score": 1}, "has no option 'score'"),
        ("format", {"response": "x"}, "has no option 'response'"),
        ("megarl.rewards.rules:even_fraction", {"base": 2}, "has no option 'base'"),
        (f"{__name__}:close", {"tolerence": 1.0}, "did you mean tolerance?"),
        (f"{__name__}:close", {"x": 1.0}, "it takes tolerance; remove it"),
    ],
)
def test_an_option_that_a_reward_does_not_take(name, options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        check_rewards([Reward(name=name, options=options)])


def test_options_that_rewards_take():
    check_rewards([Reward(name=f"{__name__}:close", options={"tolerance": 1.0})])
    check_rewards([Reward(name=f"{__name__}:anything", options={"whatever": 1.0})])


def close(response, answer, tolerance=0.0):
    return float(abs(float(response) - float(answer)) <= tolerance)


def anything(**everything):
    return 0.0


def test_a_reward_named_twice():
    with pytest.raises(ValueError, match="given twice"):
        check_rewards([Reward(name="format"), Reward(name="format", weight=0.5)])


def test_a_module_that_fails_while_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "broken_reward.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="ZeroDivisionError: division by zero"):
        reward_function(Reward(name="broken_reward:f"))
