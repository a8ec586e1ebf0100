"""Which groups of groups.yaml have spread, by the filter of config.yaml, and which have advantages."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from megarl.algorithms.objective import Objective
from megarl.config.load import load_config
from megarl.config.schema import Algorithm
from megarl.data.collate import collate
from megarl.rollout.reward_shaping import shaped
from megarl.rollout.schedule import has_spread
from megarl.types import Group, Prompt, Sample, TokenScores


def read(folder: Path) -> tuple[Algorithm, list[Group]]:
    """A sample is its reward, or {reward, steps: {token: reward}, finish}; its tokens 1 to 4 are trained."""
    config = load_config(folder / "config.yaml")
    shape = partial(shaped, config.algorithm, config.rollout.max_tokens)
    groups = []
    for number, rows in enumerate(yaml.safe_load((folder / "groups.yaml").read_text())):
        samples = [shape(sample(index, row)) for index, row in enumerate(rows)]
        groups.append(Group(Prompt(number, (0,), ""), tuple(samples)))
    return config.algorithm, groups


def sample(index: int, row: Any) -> Sample:
    row = row if isinstance(row, dict) else {"reward": row}
    steps = tuple((int(token), float(reward)) for token, reward in row.get("steps", {}).items())
    tokens, zeros = torch.arange(5), torch.zeros(5)
    return Sample(
        0,
        index,
        tokens,
        tokens > 0,
        zeros,
        zeros.int(),
        row.get("finish", "stop"),
        reward=float(row.get("reward", sum(reward for _, reward in steps))),
        step_rewards=steps,
        has_outcome="reward" in row,
    )


def spread(folder: Path) -> list[bool]:
    algorithm, groups = read(folder)
    return [has_spread(group, algorithm) for group in groups]


def advantages(folder: Path) -> list[bool]:
    algorithm, groups = read(folder)
    objective = Objective(algorithm)
    found = []
    for group in groups:
        batch = collate([group], temperature=1.0, mask_truncated=algorithm.truncated == "mask")
        scores = TokenScores(torch.zeros(batch.num_tokens), None)
        scored, _ = objective.advantages(batch, scores, objective.initial_state())
        found.append(bool(scored.advantages.any()))
    return found
