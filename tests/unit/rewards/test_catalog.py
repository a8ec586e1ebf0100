"""How a reward's name is found and its options judged, before anything starts."""

from __future__ import annotations

import re
from functools import partial

import pytest

from megarl.config.schema import Reward
from megarl.rewards.catalog import make_rewards
from megarl.rewards.interface import Score, ScoreError, ScoreRequest

JUDGE = {"url": "http://host:8000/v1", "model": "m"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("acuracy", "did you mean accuracy"),
        ("zzz", "choose from accuracy, format, code, judge, process"),
        ("proces", "did you mean process"),
        ("ftp://host/score", "is not the URL of a server"),
        ("http://:80/score", "is not the URL of a server"),
        ("http://host:port/score", "is not the URL of a server"),
        ("http://me:secret@host/score", "use headers_env"),
        ("no_such.module:f", "cannot be imported"),
        ("megarl.rewards.rules:nothing", "has no 'nothing'"),
        ("megarl.rewards.rules:BUILT_IN", "not a function"),
        (":f", "write package.module:function"),
    ],
)
def test_a_name_that_is_not_found(name, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        make_rewards([Reward(name=name)])


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        (
            "accuracy",
            {"strict": True},
            "name='accuracy' has no option 'strict'; it takes none; remove it",
        ),
        ("accuracy", {"score": 1}, "has no option 'score'"),
        ("format", {"response": "x"}, "has no option 'response'"),
        ("megarl.rewards.rules:even_fraction", {"base": 2}, "has no option 'base'"),
        (f"{__name__}:close", {"tolerence": 1.0}, "did you mean tolerance?"),
        (f"{__name__}:close", {"x": 1.0}, "it takes tolerance; remove it"),
        ("http://host/score", {"retry": 1}, "did you mean retries?"),
        (
            "http://host/score",
            {"timeout_s": -1},
            "option timeout_s=-1 is invalid: it should be greater than 0",
        ),
        (
            "http://host/score",
            {"headers_env": {"Authorization": "NO_SUCH_ENV"}},
            "NO_SUCH_ENV, which is not set",
        ),
        ("code", {"time": 1}, "did you mean time_s?"),
        ("code", {"sandbox": "none"}, "it should be 'strict' or 'best_effort'"),
        ("judge", {"model": "m"}, "needs the option url"),
        ("judge", {"url": "host", "model": "m"}, "is not the URL of a server"),
        ("judge", {**JUDGE, "modle": "m"}, "did you mean model?"),
        ("judge", {**JUDGE, "template": "Grade {answer}"}, "template lacks {response}"),
        ("judge", {**JUDGE, "template": "Grade {response}"}, "template lacks VERDICT-{tag}"),
        ("judge", {**JUDGE, "parse": "last_number"}, "it should be 'json', 'number' or 'regex'"),
        ("judge", {**JUDGE, "parse": "regex"}, "pattern and parse: regex go together"),
        ("judge", {**JUDGE, "parse": "regex", "pattern": "[0-9]"}, "has no group"),
        ("judge", {**JUDGE, "range": [1, 1]}, "is empty"),
        ("process", {"splitter": "newline"}, "needs the option scorer"),
        ("process", {"scorer": "no_such.module:f"}, "cannot be imported"),
        (
            "process",
            {"scorer": f"{__name__}:close", "splitter": "regex"},
            "pattern and regex go together",
        ),
        (
            "process",
            {"scorer": f"{__name__}:close", "splitter": "lines"},
            "it should be 'paragraph', 'newline'",
        ),
        (
            "process",
            {"scorer": f"{__name__}:close", "options": {"toler": 1}},
            "did you mean tolerance?",
        ),
    ],
)
def test_an_option_that_a_reward_does_not_take(name, options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        make_rewards([Reward(name=name, options=options)])


def test_options_that_rewards_take():
    make_rewards([Reward(name=f"{__name__}:close", options={"tolerance": 1.0})])
    make_rewards([Reward(name=f"{__name__}:anything", options={"whatever": 1.0})])


def close(response, answer, tolerance=0.0):
    return float(abs(float(response) - float(answer)) <= tolerance)


def anything(**everything):
    return 0.0


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.5, "acc": True, "data_source": data_source}


def trl(completions, **kwargs):
    return [1.0]


def positional(response, /):
    return 1.0


async def coroutine(response):
    return 1.0


def generator(response):
    yield 1.0


class Scored:
    def __init__(self, response):
        self.response = response


class AsyncCall:
    async def __call__(self, response):
        return 1.0


async_call = AsyncCall()
async_part = partial(coroutine, response="a")


@pytest.mark.parametrize(
    ("function", "extra", "missing"),
    [
        (
            verl,
            {},
            "demands data_source, ground_truth, solution_str, but there are prompt, response",
        ),
        (verl, {"data_source": "gsm8k"}, "it demands ground_truth, solution_str, but"),
        (trl, {"completions_2": 1}, "it demands completions, but there are prompt, response, "),
        (positional, {}, "it demands response by position"),
        (close, {}, ""),
        (anything, {}, ""),
    ],
)
def test_what_a_function_demands_is_known_before_a_run(function, extra, missing):
    [reward] = make_rewards([Reward(name=f"{__name__}:{function.__name__}")])
    assert reward.check
    if not missing:
        return reward.check("1", extra)
    with pytest.raises(ScoreError, match=re.escape(missing)) as error:
        reward.check("1", extra)
    assert set(extra) <= set(str(error.value).split("there are ")[-1].split(", "))


def test_what_a_step_scorer_demands_is_known_before_a_run():
    def check(function):
        options = {"scorer": f"{__name__}:{function.__name__}"}
        make_rewards([Reward(name="process", options=options)])[0].check("1", {})

    check(by_step)
    with pytest.raises(ScoreError, match=r"it demands completions, but .*, steps$"):
        check(trl)


def by_step(steps, prompt):
    return [1.0] * len(steps)


@pytest.mark.parametrize("name", ["coroutine", "generator", "Scored", "async_call", "async_part"])
def test_what_returns_no_number_is_no_reward(name):
    with pytest.raises(ValueError, match=f"{name}' is not a plain function .*returns a number"):
        make_rewards([Reward(name=f"{__name__}:{name}")])


def test_the_score_of_a_dictionary_is_the_reward():
    options = {"data_source": "a", "solution_str": "b", "ground_truth": "c"}
    [reward] = make_rewards([Reward(name=f"{__name__}:verl", options=options)])
    reward.check(None, {})
    assert reward([ScoreRequest("0", "p", "r")]) == [Score(0.5)]


def test_accuracy_needs_an_answer_or_a_judge():
    [reward] = make_rewards([Reward(name="accuracy")])
    reward.check("1", {})
    reward.check(None, {"score": float})
    for extra in ({}, {"score": "a column"}):
        with pytest.raises(ScoreError, match="no answer to compare with"):
            reward.check(None, extra)


def test_a_reward_named_twice():
    with pytest.raises(ValueError, match="listed twice"):
        make_rewards([Reward(name="format"), Reward(name="format", weight=0.5)])


def test_a_module_that_fails_while_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "broken_reward.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="ZeroDivisionError: division by zero"):
        make_rewards([Reward(name="broken_reward:f")])
