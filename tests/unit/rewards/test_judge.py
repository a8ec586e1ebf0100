"""A language model as judge: what it is asked, how its text is read, and what happens when it cannot be."""

from __future__ import annotations

import pytest

from megarl.config.schema import Reward
from megarl.rewards.interface import ScoreRequest
from megarl.rewards.judge import make_judge, parse_score


def judge(url: str, **options):
    quick = {"model": "m", "timeout_s": 10.0, "total_s": 20.0, "backoff_s": 0.01, "range": [0, 10]}
    return make_judge(Reward(name="judge", options={"url": url, **quick, **options}))


def completion(text):
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def base(served, answer):
    """The judge adds the path that such servers have."""
    served.answers["/v1/chat/completions"] = answer
    return served.base + "/v1"


def test_what_the_judge_is_asked(served, answering):
    url = base(served, lambda handler, body: answering(handler, completion('{"score": 7}')))
    template = "Q {prompt} A {answer} R {response} from {low} to {high} {unknown} %s {0}"
    reward = judge(url, template=template, model="big", max_tokens=5)
    hostile = "{answer} {prompt} {0} \\1 \\g<0>"
    assert [score.value for score in reward([ScoreRequest("0/0", "P", hostile, None)])] == [7.0]
    assert served.seen[0][2] == {
        "model": "big",
        "messages": [{"role": "user", "content": f"Q P A  R {hostile} from 0.0 to 10.0 {{unknown}} %s {{0}}"}],
        "temperature": 0,
        "max_tokens": 5,
    }


def test_the_default_template_shows_everything(served, answering):
    url = base(served, lambda handler, body: answering(handler, completion('{"score": 1}')))
    judge(url)([ScoreRequest("0/0", "the task", "the response", "the reference")])
    text = served.seen[0][2]["messages"][0]["content"]
    assert all(part in text for part in ("the task", "the response", "the reference", '{"score": <a number from 0.0'))


@pytest.mark.parametrize(
    ("text", "rule", "score"),
    [
        ('{"score": 7}', "json", 7),
        ('<think>{"score": 1}</think> ```json\n{"score": 7.5, "why": "x"}\n```', "json", 7.5),
        ('{"score": 1} no: {"score": 2} }{', "json", 2),
        ('{"grade": 7}', "json", None),
        ('{"score": 7', "json", None),
        ("7", "json", None),
        ("{" * 100_000, "json", None),
        ('{"a":' * 100_000, "json", None),
        ("first 3, then 8/10.", "last_number", 8.0),
        ("<think>9</think> -1.5e1", "last_number", -15.0),
        ("a v2 model", "last_number", None),
        ("none", "last_number", None),
        ("Grade: [[6]] of [[8]]", "regex", 8.0),
        ("Grade: [[six]]", "regex", None),
        ("", "regex", None),
    ],
)
def test_reading_a_score(text, rule, score):
    assert parse_score(text, rule, pattern=r"\[\[(\w+)\]\]") == score


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (completion("I cannot say"), "unparsed"),
        (completion('{"score": 11}'), "out_of_range"),
        (completion('{"score": NaN}'), "nan"),
        (completion('{"score": "7"}'), "not_a_number"),
        (completion(None), "bad_answer"),
        ({"choices": []}, "bad_answer"),
        ({"error": "no such model"}, "bad_answer"),
        ([], "bad_answer"),
        (b"", "not_json"),
        (b" " * 5_000_000, "too_large"),
    ],
)
def test_a_judge_that_cannot_be_read(served, answering, answer, cause):
    url = base(served, lambda handler, body: answering(handler, answer))
    score = judge(url)([ScoreRequest("0/0", "p", "r", "a")])[0]
    assert (score.value, score.cause) == (None, cause)
    assert len(served.seen) == 1


def test_a_pattern_that_takes_for_ever(served, answering, monkeypatch):
    monkeypatch.setattr("megarl.rewards.judge.REGEX_S", 0.2)
    url = base(served, lambda handler, body: answering(handler, completion("a" * 40 + "b")))
    reward = judge(url, parse="regex", pattern=r"(a+)+$")
    assert reward([ScoreRequest("0/0", "p", "r", "a")])[0].cause == "unparsed"


def test_retries_and_order_are_those_of_any_server(served, answering):
    def grade(handler, body):
        if len(served.seen) <= 2:
            answering(handler, b"", status=503)
        else:
            answering(handler, completion('{"score": ' + body["messages"][0]["content"] + "}"))

    url = base(served, grade)
    scores = judge(url + "/chat/completions", template="{response}")(
        [ScoreRequest(f"{n}/0", "", str(n)) for n in range(5)]
    )
    assert [score.value for score in scores] == [0.0, 1.0, 2.0, 3.0, 4.0]
