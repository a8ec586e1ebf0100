"""Changes to a sample's reward before any statistics: truncated responses and overlong shaping.

    scored sample --> replace the reward if truncated --> subtract the overlong penalty --> shaped sample

Filtering, baselines and metrics use the shaped reward; `megarl.algorithms.objective` clips and normalises it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megarl.config.schema import Algorithm
from megarl.types import Sample

LARGEST = torch.finfo(torch.float32).max


def overlong_penalty(length: int, *, max_tokens: int, buffer: int, factor: float) -> float:
    """0 up to max_tokens - buffer, then linear down to -factor at max_tokens (DAPO, arXiv 2503.14476, equation 13)."""
    if not buffer:
        return 0.0
    return -min(max(length - (max_tokens - buffer), 0), buffer) / buffer * factor


@dataclass(frozen=True)
class Shaping:
    """Sample -> Sample, for `Rollouts.shape`."""

    algorithm: Algorithm
    max_tokens: int  # of a response

    @property
    def buffer(self) -> int:
        """In tokens; a configured value below 1 is a fraction of max_tokens."""
        buffer = self.algorithm.overlong.buffer
        return round(buffer * self.max_tokens) if buffer < 1 else round(buffer)

    def __call__(self, sample: Sample) -> Sample:
        """Returns unscored samples unchanged; removes a reward that overflows fp32."""
        if sample.reward is None:
            return sample
        if sample.finish == "length" and self.algorithm.truncated == "penalise":
            sample = replace(
                sample, reward=self.algorithm.truncated_reward, step_rewards=(), has_outcome=True
            )
        if self.buffer:
            length, factor = int(sample.trainable.sum()), self.algorithm.overlong.factor
            penalty = overlong_penalty(
                length, max_tokens=self.max_tokens, buffer=self.buffer, factor=factor
            )
            rewards = {**sample.rewards, "overlong": penalty}
            sample = replace(sample, reward=(sample.reward or 0.0) + penalty, rewards=rewards)
        values = [sample.reward or 0.0, *(reward for _, reward in sample.step_rewards)]
        if any(abs(value) > LARGEST for value in values):
            return sample.without_reward("reward/total/overflow")
        return sample
