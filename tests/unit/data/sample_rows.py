"""Samples written as strings, for the tests of this folder."""

from __future__ import annotations

from collections import deque

import torch

from megarl.data.collate import collate
from megarl.data.rows import Source
from megarl.types import Group, Prompt, Sample, TrainBatch


def sample(
    trainable: str, *, prompt_id: int = 0, index: int = 0, first: int = 10, **more
) -> Sample:
    """`trainable` as "..xx.x": one character a token; tokens count up from `first`, log-probs are -token."""
    flags = torch.tensor([character == "x" for character in trainable])
    tokens = torch.arange(first, first + len(trainable))
    more = {"finish": "stop", "reward": 1.0} | more
    versions = torch.where(flags, tokens % 7, -1).int()
    return Sample(
        prompt_id, index, tokens, flags, torch.where(flags, -tokens.float(), 0.0), versions, **more
    )


def batch_of(*samples: Sample) -> TrainBatch:
    return collate([Group(Prompt(s.prompt_id, (), ""), (s,)) for s in samples], temperature=0.7)


def read_all(source: Source, is_eval_set: bool) -> None:
    deque(source.problems(), maxlen=0)
