"""The reward `model`: a reward model scores the samples of a step, on the devices of policy and engine, in turn.

    samples, the same on every rank --their tokens--> forward pass of all ranks --> a score each --> Sample.reward

    rewards: [{name: model, weight: 1.0, options: {path: FOLDER}}, {name: format, weight: 0.1}]

`path` is a folder that stage reward_model exported, or a sequence classifier with one label, with the policy's
tokenizer; one with another, or on other machines, is a server: `megarl serve-reward FOLDER`. A process reward model
scores the steps of a response (process.py) at their last tokens, for `algorithm.advantage: grpo_process`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from megarl.data.collate import token_batch
from megarl.rewards.interface import Decode
from megarl.rewards.process import SPLITTERS, Splitter, split_steps, token_ends
from megarl.types import Sample, TokenBatch


@dataclass(frozen=True)
class ModelReward:
    """Adds a model's scores to samples, which are the same on every rank.

    `score` returns the score of each row [N], or with `is_process` of each position [T] that is True in its mask.
    """

    weight: float
    score: Callable[[TokenBatch], Tensor]
    is_process: bool = False
    splitter: Splitter = "paragraph"
    decode: Decode = lambda tokens: ""

    def __call__(self, samples: Sequence[Sample]) -> list[Sample]:
        """Returns the samples in order. Those that another reward has dropped stay so, as does one scored NaN."""
        result, ends = list(samples), dict[int, list[int]]()
        for number, sample in enumerate(samples):
            if sample.reward is not None and (row := self._step_ends(sample)) is not None:
                ends[number] = row
            elif sample.reward is not None:
                result[number] = sample.without_reward("reward/model/no_tokens")
        values = (
            self._values([samples[number] for number in ends], [*ends.values()]) if ends else []
        )
        for (number, row), scores in zip(ends.items(), values, strict=True):
            result[number] = self._added(samples[number], scores, row)
        return result

    def _values(
        self, samples: Sequence[Sample], ends: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """The score of each sample, or those of its steps."""
        batch = token_batch(
            [(sample.tokens, sample.trainable) for sample in samples], temperature=1.0
        )
        if not self.is_process:
            return [[score] for score in self.score(batch).tolist()]
        starts = batch.cu_seqlens.tolist()
        positions = [[start + end for end in row] for start, row in zip(starts, ends, strict=False)]
        mask_T = torch.zeros_like(batch.mask)
        mask_T[[position for row in positions for position in row]] = True
        values_T = self.score(replace(batch, mask=mask_T))
        return [values_T[row].tolist() for row in positions]

    def _step_ends(self, sample: Sample) -> list[int] | None:
        """The tokens that complete the steps to score; None if the tokens do not decode to the response's text."""
        if not self.is_process:
            return []
        response = sample.trainable.nonzero().flatten().tolist()
        steps = split_steps(sample.text, SPLITTERS[self.splitter])
        ends = token_ends(self.decode, sample.tokens[sample.trainable].tolist(), steps)
        return None if ends is None else [response[end] for end in ends]

    def _added(self, sample: Sample, values: Sequence[float], ends: Sequence[int]) -> Sample:
        if not all(map(math.isfinite, values)):
            return sample.without_reward("reward/model/nan")
        mean = fmean(values) if values else 0.0
        steps = tuple((end, self.weight * value) for end, value in zip(ends, values, strict=False))
        # without an outcome, the reward only shows the mean of the steps
        base = 0.0 if not (self.is_process or sample.has_outcome) else sample.reward or 0.0
        added = 0.0 if self.is_process and sample.has_outcome else self.weight * mean
        return replace(
            sample,
            reward=base + added,
            rewards={**sample.rewards, "model": mean},
            step_rewards=(*sample.step_rewards, *steps),
            has_outcome=sample.has_outcome or not (self.is_process or self.weight == 0),
        )
