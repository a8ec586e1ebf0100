"""The rewards by name reach the objective: here one that normalises each of them on its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isnan

import pytest
import torch
from torch import Tensor

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.objective import Objective
from megarl.algorithms.whitening import whiten
from megarl.config.schema import Algorithm
from megarl.data.collate import collate, take_rows
from megarl.types import (
    Group,
    ObjectiveState,
    Prompt,
    Sample,
    ScoredBatch,
    TokenScores,
    TrainBatch,
)


def sample(prompt: int, index: int, rewards: Mapping[str, float]) -> Sample:
    return Sample(
        prompt,
        index,
        torch.tensor([1, 2, 3]),
        torch.tensor([False, True, True]),
        torch.zeros(3),
        torch.tensor([-1, 0, 0], dtype=torch.int32),
        "stop",
        reward=sum(rewards.values()),
        rewards=rewards,
    )


def batch_of(rows: list[list[dict[str, float]]]) -> TrainBatch:
    groups = []
    for number, rewards in enumerate(rows):
        samples = tuple(sample(number, index, each) for index, each in enumerate(rewards))
        groups.append(Group(Prompt(number, (1,), ""), samples))
    return collate(groups, temperature=1.0)


def gdpo(batch: TrainBatch, weights: Mapping[str, float]) -> Tensor:
    """GDPO, arXiv 2601.05242: the weighted sum of advantages of each reward, whitened."""
    total_T = torch.zeros(batch.num_tokens)
    for name, weight in weights.items():
        reward_T = total_T.new_zeros(batch.num_tokens).index_put(
            (batch.outcome_at,), batch.reward_parts[name]
        )
        total_T += weight * ADVANTAGES["grpo"](reward_T, batch.mask, batch.cu_seqlens, batch.group)
    return whiten(total_T, batch.mask)


@dataclass(frozen=True)
class Gdpo(Objective):
    weights_of_rewards: Mapping[str, float] = field(default_factory=dict)

    def advantages(
        self, batch: TrainBatch, scores: TokenScores, state: ObjectiveState
    ) -> tuple[ScoredBatch, ObjectiveState]:
        scored, state = super().advantages(batch, scores, state)
        return replace(scored, advantages=gdpo(batch, self.weights_of_rewards)), state


ROWS = [
    [{"accuracy": 1.0, "format": 0.01}, {"accuracy": 0.0, "format": 0.02}],
    [{"accuracy": 1.0, "format": 0.02}, {"accuracy": 0.0, "format": 0.01}],
]


def test_each_reward_counts_by_its_weight_and_not_by_its_scale() -> None:
    objective = Gdpo(Algorithm(), weights_of_rewards={"accuracy": 2.0, "format": 1.0})
    batch = batch_of(ROWS)
    scored, _ = objective.advantages(batch, TokenScores(), objective.initial_state())
    first_N = scored.advantages[batch.cu_seqlens[:-1]]
    # 2 - 1, -2 + 1, 2 + 1, -2 - 1 deviations
    assert (first_N / first_N[0]).tolist() == pytest.approx([1, -1, 3, -3], rel=1e-3)
    grpo, _ = Objective(Algorithm()).advantages(batch, TokenScores(), objective.initial_state())
    first_N = grpo.advantages[batch.cu_seqlens[:-1]]
    assert (first_N / first_N[0]).tolist() == pytest.approx([1, -1, 1, -1], rel=1e-3)


def test_parts_go_with_their_rows() -> None:
    """Into a batch of some rows, and into a scored batch."""
    rows = [*ROWS, [{"accuracy": 0.5, "format": 0.0, "overlong": -0.5}, {"accuracy": 0.25}]]
    batch = batch_of(rows)
    assert batch.reward_parts["accuracy"].tolist() == [1.0, 0.0, 1.0, 0.0, 0.5, 0.25]
    assert isnan(batch.reward_parts["format"][5])
    objective = Objective(Algorithm())
    scored, _ = objective.advantages(batch, TokenScores(), objective.initial_state())
    some = take_rows(scored, [4, 1])
    assert some.reward_parts["accuracy"].tolist() == [0.5, 0.0]
    assert some.reward_parts["overlong"][0] == -0.5
    assert isnan(some.reward_parts["overlong"][1])
