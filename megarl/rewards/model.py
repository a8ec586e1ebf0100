"""The `model` reward: a reward model on the run's devices scores the samples of a step.

    samples, the same on every rank --their tokens--> forward pass of all ranks
                                    --one score each--> Sample.reward

    rewards: [{name: model, weight: 1.0, options: {path: FOLDER}}, {name: format, weight: 0.1}]

`path` is a folder that stage reward_model exported, or a sequence classifier with one label. It
must have the policy's tokenizer; to use a model with another tokenizer, or on other machines, run a
server: `megarl serve-reward FOLDER`. A process reward model scores the steps of a response
(process.py) at their last tokens, for `algorithm.advantage: grpo_process`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean

import torch
from torch import Tensor

from megarl.data.collate import token_batch
from megarl.rewards.interface import Decode, Score
from megarl.rewards.process import SPLITTERS, Splitter, split_steps, token_ends
from megarl.rewards.scorer import with_score
from megarl.types import Sample, TokenBatch


@dataclass(frozen=True)
class ModelReward:
    """Adds a model's scores to samples. Every rank must pass the same samples.

    `score` returns one score per row [N]. With `is_process`, it returns one value per position [T],
    of which those where the batch's mask is True are used.
    """

    weight: float
    score: Callable[[TokenBatch], Tensor]
    is_process: bool = False
    splitter: Splitter = "paragraph"
    decode: Decode = lambda tokens: ""

    def __call__(self, samples: Sequence[Sample]) -> list[Sample]:
        """Returns the samples with the model's scores, in order.

        Samples that another reward has dropped stay dropped. A sample whose score is not finite is
        dropped.
        """
        result = list(samples)
        ends = {}
        for number, sample in enumerate(samples):
            if sample.reward is None:
                continue
            row = self._step_ends(sample)
            if row is None:
                result[number] = sample.without_reward("reward/model/no_tokens")
            else:
                ends[number] = row
        if not ends:
            return result
        values = self._values([samples[number] for number in ends], [*ends.values()])
        for (number, row), scores in zip(ends.items(), values, strict=True):
            sample = samples[number]
            if not all(map(math.isfinite, scores)):
                result[number] = sample.without_reward("reward/model/nan")
                continue
            mean = fmean(scores) if scores else 0.0
            steps = tuple(zip(row, scores, strict=True)) if self.is_process else None
            score = Score(mean, steps=steps)
            result[number] = with_score(sample, "model", self.weight, score)
        return result

    def _values(
        self, samples: Sequence[Sample], ends: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Returns the scores of each sample: one, or with `is_process` one per step."""
        batch = token_batch([(sample.tokens, sample.trainable) for sample in samples])
        if not self.is_process:
            return [[score] for score in self.score(batch).tolist()]
        positions = []
        for sample, start, row in zip(samples, batch.cu_seqlens.tolist(), ends, strict=False):
            positions.append((start + sample.trainable.nonzero().flatten()[row]).tolist())
        mask_T = torch.zeros_like(batch.mask)
        mask_T[[*chain.from_iterable(positions)]] = True
        values_T = self.score(replace(batch, mask=mask_T))
        return [values_T[row].tolist() for row in positions]

    def _step_ends(self, sample: Sample) -> list[int] | None:
        """Returns the index of the response's token that completes each step; [] without
        `is_process`.

        Returns None if the tokens do not decode to the response's text.
        """
        if not self.is_process:
            return []
        steps = split_steps(sample.text, SPLITTERS[self.splitter])
        return token_ends(self.decode, sample.tokens[sample.trainable].tolist(), steps)
