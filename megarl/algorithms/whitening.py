"""Whitening of advantages over the whole rollout batch, every trainable token counted once.

Statistics are fp64 and merge (Chan et al. 1983), so any sharding of the rows gives the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.segments import clean

__all__ = ["Stats", "whiten", "whiten_stats"]


@dataclass(frozen=True, slots=True)
class Stats:
    """Count, mean and sum of squared deviations from that mean."""

    n: float
    mean: float
    m2: float

    def merge(self, other: Stats) -> Stats:
        n = self.n + other.n
        if n == 0:
            return self
        delta = other.mean - self.mean
        return Stats(n, self.mean + delta * other.n / n, self.m2 + other.m2 + delta**2 * self.n * other.n / n)

    def variance(self, *, biased: bool = False) -> float:
        """0 for fewer than two values, and for values that differ only by rounding."""
        variance = self.m2 / (self.n - (0 if biased else 1)) if self.n > 1 else 0.0
        return 0.0 if variance <= (1e-6 * self.mean) ** 2 else variance


def whiten_stats(x_T: Tensor, mask_T: Tensor) -> Stats:
    """Statistics of `x_T` over the True positions: two passes in fp64."""
    x_K = torch.masked_select(x_T, mask_T.bool()).double()
    if x_K.numel() == 0:
        return Stats(0, 0.0, 0.0)
    variance, mean = torch.var_mean(x_K, correction=0)
    return Stats(x_K.numel(), mean.item(), variance.item() * x_K.numel())


def whiten(
    x_T: Tensor,
    mask_T: Tensor,
    *,
    stats: Stats | None = None,
    center_only: bool = False,
    eps: float = 1e-8,
    biased: bool = False,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) on True positions, 0 elsewhere; constant values give exactly 0.

    `stats` are those of the whole rollout batch where `x_T` is only a part of it.
    """
    stats = whiten_stats(x_T, mask_T) if stats is None else stats
    variance = stats.variance(biased=biased)
    if variance == 0.0:
        return torch.zeros_like(x_T)
    scale = 1.0 if center_only else (variance + eps) ** -0.5
    return (clean(x_T, mask_T.bool()).double().sub_(stats.mean).mul_(scale)).mul_(mask_T.bool()).to(x_T.dtype)
