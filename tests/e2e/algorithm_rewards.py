"""Rewards of the runs in algorithm_ranks.py: of the tokens alone, kind and hostile."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any


def even(tokens: Sequence[int]) -> float:
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)


def steps(steps: Sequence[str]) -> list[float]:
    return [even([int(token) for token in step.split()]) for step in steps]


def coarse(tokens: Sequence[int]) -> float:
    """Right about one time in ten: many groups of eight are all wrong."""
    return float(even(tokens) > 0.65)


def same(tokens: Sequence[int]) -> float:
    return 0.7


CALLS = itertools.count()


def hostile(tokens: Sequence[int]) -> float:
    """Every step of 64 samples is hostile in its own way: numbers out of bounds, none at all, huge, kind."""
    step = next(CALLS) // 64
    if step == 0:
        return {0: float("inf"), 1: float("nan"), 2: 1e39, 3: -1e300}.get(
            tokens[0] % 8, even(tokens)
        )
    if step == 1:
        raise RuntimeError("the server is down")
    return 1e30 * even(tokens) if step == 2 else even(tokens)


def judged(split: str, vocab: int, size: int = 512) -> list[dict[str, Any]]:
    """A prompt, and steps of which those that end with an even id are right."""
    draw, rows = random.Random(split), []
    for _ in range(size):
        steps = [
            draw.choices(range(4, vocab), k=draw.randint(1, 4)) for _ in range(draw.randint(1, 3))
        ]
        texts = [" ".join(map(str, step)) for step in steps]
        rows.append(
            {"prompt": "5 6", "completions": texts, "labels": [step[-1] % 2 == 0 for step in steps]}
        )
    return rows
