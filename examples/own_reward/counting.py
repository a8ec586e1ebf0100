"""A task and a reward of your own: digits to count on from, and how far a response counts."""

from __future__ import annotations

import random
from itertools import pairwise

NEXT = {str(digit): str((digit + 1) % 10) for digit in range(10)}


def starts(split: str, size: int = 200, seed: int = 0) -> list[dict[str, str]]:
    """Returns the rows of a split, "train" or "eval". `task.options` are the other parameters."""
    draw = random.Random(f"{split}/{seed}")
    return [{"prompt": f"{draw.randrange(10)}"} for _ in range(size)]


def counts_on(prompt: str, response: str) -> float:
    """Returns the share of the response's first four characters that follow the one before them:
    after "7", "8901" scores 1 and "8011" scores 0.5.
    """
    pairs = pairwise(prompt + response[:4])
    return sum(NEXT.get(digit) == following for digit, following in pairs) / 4
