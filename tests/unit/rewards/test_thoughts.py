"""Where thoughts end: tags of several families, and thoughts that the prompt has opened."""

from __future__ import annotations

import time

import pytest

from megarl.config.schema import Reward
from megarl.data.thoughts import TAGS, after_thoughts, opened_tag
from megarl.rewards.code import extract_code
from megarl.rewards.interface import ScoreRequest
from megarl.rewards.judge import JudgeOptions, parse_score
from megarl.rewards.remote import request_row
from megarl.rewards.rules import format_think
from megarl.rewards.scorer import make_scorer
from megarl.types import Prompt

from .test_scorer import PROMPT, sample, scorer_of


@pytest.mark.parametrize("tag", TAGS)
def test_every_family_has_an_end(tag):
    assert after_thoughts(f"{tag}a{TAGS[tag]} 5") == " 5"
    assert after_thoughts(f"{tag}a") is None
    assert opened_tag(f"<|im_start|>assistant\n{tag}\n") == tag
    assert opened_tag(f"{tag}{TAGS[tag]}\n\n") == ""
    assert format_think(response=f"{tag}a{TAGS[tag]}5") == 1.0
    assert format_think(response=f"a{TAGS[tag]}5", opening=tag) == 1.0


@pytest.mark.parametrize(
    ("prompt", "tag"),
    [
        ("Assistant: <think>", "<think>"),
        ("assistant\n<think>\nOkay, so", "<think>"),
        ("use <think> and </think>.<|im_start|>assistant\n", ""),
        ("Begin with <think>.<|im_start|>assistant\n", ""),
        ("Begin with <think> and think. Answer: ", ""),
        ("<think>a</think> <think>", "<think>"),
        ("", ""),
    ],
)
def test_what_a_prompt_opens(prompt, tag):
    assert opened_tag(prompt) == tag


def test_tags_of_two_families_make_no_thought():
    assert format_think(response="<think>a[/THINK]5") == 0.0
    assert format_think(response="<think>a</think>5", opening="<think>") == 0.0
    assert format_think(response="a</think> ", opening="<think>") == 0.0


def test_what_was_thought_is_no_code_and_no_verdict():
    assert extract_code("<think>```python\na = 1\n```") == ""
    assert extract_code("[THINK]```a```[/THINK]```python\nb = 1\n```") == "b = 1\n"
    number = JudgeOptions(url="http://host", model="m", parse="number")
    assert parse_score("<think>VERDICT-ab: 1", "ab", number) is None
    assert parse_score("[THINK]VERDICT-ab: 1[/THINK]VERDICT-ab: 0.5", "ab", number) == 0.5


def test_rewards_know_what_the_prompt_opened():
    prompt = Prompt(0, (4,), "what is 8 + 9?<think>\n", "17")
    rewards = [Reward(name="accuracy"), Reward(name="format")]
    texts = ["so \\boxed{17}", "8 + 9</think> 17"]
    samples = [sample(index=index, text=text) for index, text in enumerate(texts)]
    done = make_scorer(rewards).start([prompt]).results(samples)
    assert [one.rewards for one in done] == [
        {"accuracy": 0.0, "format": 0.0},
        {"accuracy": 1.0, "format": 1.0},
    ]
    scorer = scorer_of("has_opening")
    assert scorer.start([prompt]).results([sample()])[0].reward == 1.0
    assert scorer.start([PROMPT]).results([sample()])[0].reward == 0.0
    assert request_row(ScoreRequest("0", "", "", opening="<think>"))["opening"] == "<think>"


@pytest.mark.parametrize(
    "piece", ["<think>", "</think>", "[THINK]\n", "<", "<|channel|>", " ", "x"]
)
def test_a_megabyte_takes_linear_time(piece):
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    opened_tag(text)
    after_thoughts(text)
    format_think(response=text)
    assert time.process_time() - start < 5
