"""What is changed of a sample's reward before any statistics."""

from __future__ import annotations

from functools import partial

import pytest
from sample_rows import sample

from megarl.config.schema import Algorithm
from megarl.rollout.reward_shaping import overlong_penalty, shaped
from megarl.types import Sample


def shaping(max_tokens: int = 10, **values) -> partial[Sample]:
    return partial(shaped, Algorithm.model_validate(values), max_tokens)


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (6, 0.0), (7, -0.125), (8, -0.25), (10, -0.5), (12, -0.5)]
)  # max_tokens 10, the last 4 of them
def test_dapos_formula(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_tokens=10, buffer=4, factor=0.5) == penalty
    assert overlong_penalty(length, max_tokens=10, buffer=0, factor=0.5) == 0


@pytest.mark.parametrize("buffer", [4, 0.4])
def test_overlong_shaping_is_added_and_told(buffer: float) -> None:
    shape = shaping(overlong={"buffer": buffer, "factor": 0.5})
    done = shape(sample("..xxxxxxxx", reward=1.0, rewards={"accuracy": 1.0}))
    assert (done.reward, dict(done.rewards)) == (0.75, {"accuracy": 1.0, "overlong": -0.25})
    assert shaping()(done) is done


def test_what_was_cut_gets_the_reward_asked_for_and_no_steps() -> None:
    cut = sample(".xx", finish="length", reward=1.0, step_rewards=((1, 0.5),), has_outcome=False)
    done = shaping(truncated="penalise", truncated_reward=-1.0)(cut)
    assert (done.reward, done.step_rewards, done.has_outcome) == (-1.0, (), True)
    whole = sample(".xx", reward=1.0)
    aborted = sample(".xx", finish="abort", reward=1.0)  # not by length
    for other in (whole, aborted):
        assert shaping(truncated="penalise", truncated_reward=-1.0)(other) is other
    assert shaping(truncated="train")(cut) is cut and shaping(truncated="mask")(cut) is cut
    both = shaping(
        max_tokens=2, truncated="penalise", truncated_reward=-1.0, overlong={"buffer": 1}
    )(cut)
    assert both.reward == -2.0, "shaping comes after"


@pytest.mark.parametrize(
    "more", [{"reward": 1e39}, {"reward": -1e39}, {"step_rewards": ((1, 1e39),)}]
)
def test_what_fp32_cannot_hold_is_left_out_by_name(more: dict) -> None:
    done = shaping()(sample(".xx", **more))
    assert done.reward is None and done.extra["dropped"] == "reward/total/overflow"
    assert shaping()(sample(".xx", reward=1e30)).reward == 1e30


def test_an_unscored_sample_is_left_alone() -> None:
    one = sample(".xx", reward=None, finish="length")
    assert shaping(truncated="penalise", overlong={"buffer": 2})(one) is one
