"""What the objective changes of a sample's reward before any statistics: overlong shaping, truncated responses.

    scored sample --> truncated? its reward is replaced --> near the limit? less reward --> shaped sample

Pure. The first of the reward's operations, so that filtering, baselines and the log see the reward that is trained
on; clipping and normalisation follow in `megarl.algorithms.objective`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megarl.config.schema import Algorithm
from megarl.types import Sample

__all__ = ["Shaping", "overlong_penalty"]

LARGEST = torch.finfo(torch.float32).max


def overlong_penalty(length: int, *, max_tokens: int, buffer: int, factor: float) -> float:
    """0 up to max_tokens - buffer, then linearly down to -factor at max_tokens: DAPO, arXiv 2503.14476, equation 13."""
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
        """Tokens: what is given below 1 is a share of max_tokens."""
        given = self.algorithm.overlong.buffer
        return round(given * self.max_tokens) if given < 1 else round(given)

    def __call__(self, sample: Sample) -> Sample:
        """A sample without a reward comes back as it is; one whose reward fp32 cannot hold loses it."""
        if sample.reward is None:
            return sample
        if sample.finish == "length" and self.algorithm.truncated == "penalise":
            sample = replace(sample, reward=self.algorithm.truncated_reward, step_rewards=(), has_outcome=True)
        if self.buffer:
            penalty = overlong_penalty(
                int(sample.trainable.sum()),
                max_tokens=self.max_tokens,
                buffer=self.buffer,
                factor=self.algorithm.overlong.factor,
            )
            rewards = {**sample.rewards, "overlong": penalty}
            sample = replace(sample, reward=(sample.reward or 0.0) + penalty, rewards=rewards)
        values = [sample.reward or 0.0, *(reward for _, reward in sample.step_rewards)]
        if any(abs(value) > LARGEST for value in values):
            return replace(sample, reward=None, extra={**sample.extra, "dropped": "reward/total/overflow"})
        return sample
