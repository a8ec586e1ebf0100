"""Changes to a sample's reward before any statistics: truncated responses and overlong shaping.

    scored sample --> replace the reward if truncated --> subtract the overlong penalty --> shaped

Filtering, baselines and metrics use the shaped reward; `megarl.algorithms.objective` clips and
normalises it.
"""

from dataclasses import replace

import torch

from megarl.config.schema import Algorithm
from megarl.types import Sample

LARGEST = torch.finfo(torch.float32).max


def overlong_penalty(length: int, *, max_tokens: int, buffer: int, factor: float) -> float:
    """Returns 0 up to max_tokens - buffer, then falls linearly to -factor at max_tokens.

    Equation 13 of DAPO, arXiv 2503.14476.
    """
    if not buffer:
        return 0.0
    return -min(max(length - (max_tokens - buffer), 0), buffer) / buffer * factor


def shaped(algorithm: Algorithm, max_tokens: int, sample: Sample) -> Sample:
    """`Rollouts.shape`, once its first two arguments are bound; `max_tokens`: of a response.

    Returns unscored samples unchanged; removes a reward that overflows fp32.
    """
    if sample.reward is None:
        return sample
    if sample.finish == "length" and algorithm.truncated == "penalise":
        sample = replace(
            sample,
            reward=algorithm.truncated_reward,
            step_rewards=(),
            has_outcome=True,
        )
    buffer = algorithm.overlong.buffer
    if buffer < 1:  # a fraction of max_tokens
        buffer *= max_tokens
    if round(buffer):
        penalty = overlong_penalty(
            int(sample.trainable.sum()),
            max_tokens=max_tokens,
            buffer=round(buffer),
            factor=algorithm.overlong.factor,
        )
        rewards = {**sample.rewards, "overlong": penalty}
        sample = replace(sample, reward=(sample.reward or 0.0) + penalty, rewards=rewards)
    values = [sample.reward or 0.0, *(reward for _, reward in sample.step_rewards)]
    if any(abs(value) > LARGEST for value in values):
        return sample.without_reward("reward/total/overflow")
    return sample
