"""What a reward model's score makes of a sample that other rewards have scored, or dropped."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megarl.rewards.model import ModelReward
from megarl.types import Sample, TokenBatch

TRAINABLE = torch.tensor([False, True, True, True, True])
TOKENS = torch.tensor([9, 5, 6, 7, 8])
SAMPLE = Sample(
    0, 0, TOKENS, TRAINABLE, torch.zeros(5), TRAINABLE.int(), "stop", "ab\n\ncd", reward=0.5
)
DECODE = {5: "a", 6: "b\n", 7: "\nc", 8: "d"}


def score(batch: TokenBatch) -> torch.Tensor:
    """Rows: that of the last token; positions: that of each token."""
    assert batch.cu_seqlens.tolist() == [0, 5] or batch.num_rows > 1
    return batch.tokens[batch.cu_seqlens[1:] - 1].float()


def steps(batch: TokenBatch) -> torch.Tensor:
    assert batch.mask.nonzero().flatten().tolist() == [3, 4], "the tokens at which steps end"
    return torch.where(batch.mask, batch.tokens.float(), math.nan)


def decode(tokens: list[int]) -> str:
    return "".join(DECODE[token] for token in tokens)


@pytest.mark.parametrize(
    ("changes", "weight", "reward", "has_outcome"),
    [
        ({}, 2.0, 16.5, True),
        ({"has_outcome": False, "reward": 0.0}, 2.0, 16.0, True),  # no other reward
        ({"has_outcome": False, "reward": 0.3, "step_rewards": ((2, 0.3),)}, 1.0, 8.0, True),
        ({}, 0.0, 0.5, True),
        ({"has_outcome": False, "reward": 0.0}, 0.0, 0.0, False),
    ],
)
def test_a_score_is_added_to_the_outcome(
    changes: dict, weight: float, reward: float, has_outcome: bool
) -> None:
    before = replace(SAMPLE, rewards={"format": 1.0}, **changes)
    (after,) = ModelReward(weight, score)([before])
    assert (after.reward, after.has_outcome, after.rewards) == (
        reward,
        has_outcome,
        {"format": 1.0, "model": 8.0},
    )
    assert after.step_rewards == before.step_rewards


@pytest.mark.parametrize(("has_outcome", "reward"), [(True, 0.5), (False, 0.5 + 2 * 7.5)])
def test_a_process_model_rewards_the_tokens_that_end_steps(
    has_outcome: bool, reward: float
) -> None:
    model = ModelReward(2.0, steps, is_process=True, decode=decode)
    (after,) = model([replace(SAMPLE, has_outcome=has_outcome)])
    assert after.step_rewards == ((3, 14.0), (4, 16.0)) and after.rewards == {"model": 7.5}
    assert (after.reward, after.has_outcome) == (reward, has_outcome)
    (lost,) = model([replace(SAMPLE, text="ac\n\ncd")])
    assert lost.reward is None and lost.extra == {"dropped": "reward/model/no_tokens", "detail": ""}


def test_what_cannot_be_scored_is_dropped_and_the_order_is_kept() -> None:
    dropped = replace(SAMPLE, index=1, reward=None, extra={"dropped": "reward/format/error"})
    samples = [replace(SAMPLE, index=0), dropped, replace(SAMPLE, index=2, tokens=torch.arange(5))]
    after = ModelReward(1.0, lambda batch: score(batch).where(batch.tokens[4::5] != 8, math.nan))(
        samples
    )
    assert [sample.index for sample in after] == [0, 1, 2] and [
        sample.reward for sample in after
    ] == [None, None, 4.5]
    assert after[0].extra == {"dropped": "reward/model/nan", "detail": ""} and after[1] is dropped
    assert ModelReward(1.0, score)([dropped]) == [dropped] and ModelReward(1.0, score)([]) == []
