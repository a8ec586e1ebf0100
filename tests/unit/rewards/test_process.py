"""Steps of a response: where they end, in text and in tokens, and what their scores become."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megarl.config.schema import Reward
from megarl.data.collate import collate
from megarl.data.tokenizer import TokenIds
from megarl.rewards.interface import ScoreRequest
from megarl.rewards.process import SPLITTERS, make_process, split_steps, token_ends
from megarl.rewards.scorer import make_scorer
from megarl.types import Group, Prompt, Sample

HERE = __name__


def byte_level() -> Tokenizer:
    """As the byte-level BPE of Qwen and Llama: every byte a token, some merges, so that a character may be spread
    over tokens and a token may hold a break and what follows it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline, space = "\u010a", "\u0120"
    merges = [
        ("a", "b"),
        (newline, newline),
        ("ab", newline),
        (newline, "a"),
        (".", space),
        ("\u00f0", "\u0141"),
    ]
    words = [*letters, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


BPE = byte_level()
EOS = BPE.token_to_id("<eos>")
texts = st.text(st.sampled_from("ab.? \n\téя中😀𝄞\ufffd"), max_size=40)
splitters = st.sampled_from([*SPLITTERS.values(), "b+", "(?=b)", ""])


def decode(tokens) -> str:
    return BPE.decode(list(tokens), skip_special_tokens=True)


@settings(deadline=None, max_examples=60)
@given(texts, splitters)
def test_joined_steps_are_the_text(text, pattern):
    steps = split_steps(text, pattern)
    assert "".join(steps) == text
    assert len(steps) <= 1 or all(step.strip() for step in steps)


@settings(deadline=None, max_examples=60)
@given(texts, splitters)
def test_a_step_ends_at_the_token_that_completes_its_last_character(text, pattern):
    tokens = [*BPE.encode(text).ids, EOS]
    steps = split_steps(text, pattern)
    ends = token_ends(decode, tokens, steps)
    assert ends is not None and ends == sorted(ends)
    char = 0
    for step, end in zip(steps, ends, strict=True):
        char += len(step)
        by_search = next(
            n for n in range(1, len(tokens) + 1) if decode(tokens[:n])[:char] == text[:char]
        )
        assert end == by_search - 1
    assert not ends or ends[-1] < len(tokens) - 1  # never the <eos>
    assert len(set(ends)) == len(ends) or "\n" in text or pattern not in SPLITTERS.values()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, EOS - 1), max_size=30), splitters)
def test_tokens_that_are_no_text_have_ends_too(tokens, pattern):
    """What a random model writes: bytes that are no UTF-8."""
    ends = token_ends(decode, tokens, split_steps(decode(tokens), pattern))
    assert ends is not None and ends == sorted(ends) and all(0 <= end < len(tokens) for end in ends)


def test_emoji_over_tokens_and_a_token_over_steps():
    tokens = BPE.encode("😀\n\nab\nab").ids
    steps = split_steps("😀\n\nab\nab", SPLITTERS["newline"])
    assert steps == ["😀\n\n", "ab\n", "ab"]
    assert [decode([token]) for token in tokens] == [
        "\ufffd",
        "\ufffd",
        "\ufffd",
        "\n\n",
        "ab\n",
        "ab",
    ]
    assert token_ends(decode, tokens, steps) == [3, 4, 5]


def test_ids_as_text():
    ids = TokenIds((), 100)
    assert token_ends(ids.decode, [5, 17, 3], ["5 1", "7 ", "3"]) == [1, 2, 2]
    assert token_ends(ids.decode, [5, 17], ["5 18"]) is None


def test_a_long_response_is_quick():
    text = "\n\n".join(["ab中 " * 50] * 80)
    tokens = BPE.encode(text).ids
    calls = 0

    def counted(part) -> str:
        nonlocal calls
        calls += len(part)
        return decode(part)

    ends = token_ends(counted, tokens, split_steps(text, SPLITTERS["paragraph"]))
    assert len(tokens) > 20_000 and len(ends) == 80
    assert calls < len(tokens) * 80  # decoded: one tail a step, and little more


@pytest.mark.parametrize(
    ("splitter", "steps"),
    [
        ("paragraph", ["So.\nThen 3.5 is it.\n\n", "Done! 好。是"]),
        ("newline", ["So.\n", "Then 3.5 is it.\n\n", "Done! 好。是"]),
        ("sentence", ["So.\n", "Then 3.5 is it.\n\n", "Done! ", "好。", "是"]),
    ],
)
def test_splitters(splitter, steps):
    assert split_steps("So.\nThen 3.5 is it.\n\nDone! 好。是", SPLITTERS[splitter]) == steps


def step_lengths(steps, scale=1.0):
    return [scale * len(step) for step in steps]


def process(**options):
    return make_process(
        Reward(name="process", options={"scorer": f"{HERE}:step_lengths", **options}), decode
    )


def case(text: str) -> ScoreRequest:
    return ScoreRequest("0/0", "p", text, None, (*BPE.encode(text).ids, EOS))


def test_scores_of_steps():
    score = process(splitter="newline", options={"scale": 2.0})([case("ab\nb"), case("")])
    assert score[0].steps == ((0, 6.0), (1, 2.0)) and score[0].value == 4.0
    assert score[1].steps == () and score[1].value == 0.0


@pytest.mark.parametrize(
    ("scorer", "cause"),
    [
        ("one_score", "bad_answer"),
        ("a_number", "bad_answer"),
        ("nan_step", "nan"),
        ("text_step", "not_a_number"),
        ("fails", "error"),
        ("infinite_tensor", "nan"),
    ],
)
def test_a_step_without_a_score_leaves_the_sample_out(scorer, cause):
    scorer = f"tests.unit.rewards.user_functions:{scorer}"
    score = process(scorer=scorer, splitter="newline")([case("ab\nb")])[0]
    assert (score.value, score.cause, score.steps) == (None, cause, None)


def test_a_splitter_that_takes_for_ever():
    scores = process(splitter="regex", pattern="(a+)+$", function_s=0.3)(
        [case("a" * 40 + "b"), case("b")]
    )
    assert [score.cause for score in scores] == ["timeout", ""]


def test_a_server_scores_steps(served, answering):
    def grade(handler, body):
        rows = [
            {"id": row["id"], "steps": [len(step) for step in row["steps"]]}
            for row in body["samples"]
        ]
        rows[-1]["steps"] = rows[-1]["steps"][1:]
        answering(handler, {"scores": rows[::-1]})

    options = {
        "scorer": served.on(grade),
        "splitter": "newline",
        "timeout_s": 10.0,
        "total_s": 20.0,
    }
    ask = make_process(Reward(name="process", options=options), decode)
    cases = [
        ScoreRequest(f"{row}/0", "p", text, None, tuple(BPE.encode(text).ids))
        for row, text in enumerate(["ab\nb", "", "b"])
    ]
    scores = ask(cases)
    assert [score.steps for score in scores] == [((0, 3.0), (1, 1.0)), (), None]
    assert scores[2].cause == "bad_answer"
    assert [row["steps"] for row in served.seen[0][2]["samples"]] == [["ab\n", "b"], ["b"]]


def test_steps_reach_the_batch_beside_the_outcome():
    """Weights apply to each step; the reward is the outcome's alone; the tokens are the sample's, prompt included."""
    response = [*BPE.encode("ab\nb").ids, EOS]
    tokens = torch.tensor([7, 7, *response])
    trainable = torch.tensor([False, False] + [True] * len(response))
    sample = Sample(
        0, 0, tokens, trainable, torch.zeros(len(tokens)), tokens.int(), "stop", "ab\nb"
    )
    rewards = [
        Reward(
            name="process",
            weight=0.5,
            options={"scorer": f"{HERE}:step_lengths", "splitter": "newline"},
        ),
        Reward(name="format", weight=10.0),
        Reward(name="megarl.rewards.rules:even_fraction", weight=0.0),
    ]
    prompt = Prompt(0, (7, 7), "p")
    done = make_scorer(rewards, decode=decode).start([prompt]).results([sample])[0]
    assert done.step_rewards == ((2, 1.5), (3, 0.5))
    assert done.reward == 0.0 and done.rewards["process"] == 2.0 and done.has_outcome
    json.dumps(done.step_rewards)  # as it travels
    batch = collate([Group(prompt, (done,))], temperature=1.0)
    assert batch.token_rewards.tolist() == [0, 1.5, 0.5, 0, 0]
    assert batch.step_ends.tolist() == [
        False,
        True,
        True,
        True,
        False,
    ]  # the outcome is one more step, at the end

    alone = make_scorer(rewards[:1], decode=decode).start([prompt]).results([sample])[0]
    assert alone.reward == 1.0 and not alone.has_outcome and alone.step_rewards == done.step_rewards
    assert collate([Group(prompt, (alone,))], temperature=1.0).step_ends.tolist() == [
        False,
        True,
        True,
        False,
        False,
    ]
