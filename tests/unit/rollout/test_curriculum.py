"""A stream that chooses by the rewards it observes: the same prompts after a resume."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megarl.data.ledger import Ledger
from megarl.rollout.schedule import Rollouts
from megarl.types import Group, Prompt, Request, Sample


class ByDifficulty:
    """roles.Prompts: problems of a level, which rises while most samples are right."""

    def __init__(self) -> None:
        self.position = 0
        self.level = 1
        self.kept: dict[str, float] = {}

    def take(self, count: int) -> list[Prompt]:
        numbers = range(self.position, self.position + count)
        self.position += count
        return [Prompt(number, (self.level,), f"level {self.level}") for number in numbers]

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        self.position -= len(prompts)

    def observe(self, groups: Sequence[Group]) -> None:
        rewards = [sample.reward or 0.0 for group in groups for sample in group.samples]
        self.level += 1 if sum(rewards) > len(rewards) / 2 else -1

    def state(self) -> dict[str, Any]:
        return {"position": self.position, "level": self.level}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.position, self.level = state["position"], state["level"]


def generate(requests: Sequence[Request], *, version: int) -> list[Sample]:
    """All samples are right up to level 3; of those beyond, a third."""
    return [
        Sample(
            request.prompt.prompt_id,
            request.index,
            torch.tensor([*request.prompt.tokens, 9]),
            torch.tensor([False, True]),
            torch.zeros(2),
            torch.tensor([-1, version], dtype=torch.int32),
            "stop",
            reward=float(request.prompt.tokens[0] <= 3 or request.index == 0),
        )
        for request in requests
    ]


def levels(ledger: Ledger, steps: range) -> list[str]:
    rollouts = Rollouts(
        generate, samples_per_prompt=3, temperature=1.0, run_seed=0, empty_steps=0, ledger=ledger
    )
    found = []
    for step in steps:
        groups = rollouts.collect(ledger, 2, version=step).groups
        rollouts.trained(step)
        found += [group.prompt.text for group in groups]
    return found


def test_prompts_follow_the_rewards_of_earlier_ones() -> None:
    assert levels(Ledger(ByDifficulty()), range(6))[::2] == [
        f"level {level}" for level in (1, 2, 3, 4, 3, 4)
    ]


def test_a_resumed_run_has_the_same_prompts() -> None:
    whole = levels(Ledger(ByDifficulty()), range(7))
    for killed in range(1, 6):
        before = Ledger(ByDifficulty())
        first = levels(before, range(killed))
        again = Ledger(ByDifficulty())
        again.restore(json.loads(json.dumps(before.state())))
        assert first + levels(again, range(killed, 7)) == whole
