"""Whitening of advantages over the whole rollout batch, every trainable token counted once.

Statistics are fp64 and merge (Chan et al. 1983), so any sharding of the rows gives the same numbers; they are taken
block by block, each block in two passes while it is in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from megarl.algorithms.spans import lay, pick

__all__ = ["Stats", "stats_of", "whiten", "whiten_", "whiten_stats"]

BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Stats:
    """Count, mean and sum of squared deviations from that mean."""

    n: float
    mean: float
    m2: float

    def merge(self, other: Stats) -> Stats:
        if self.n == 0 or other.n == 0:
            return other if self.n == 0 else self
        n = self.n + other.n
        delta = other.mean - self.mean
        return Stats(n, self.mean + delta * other.n / n, self.m2 + other.m2 + delta * delta * self.n * other.n / n)

    def variance(self, *, biased: bool = False) -> float:
        """0 for fewer than two values, and for values that differ only by rounding."""
        variance = self.m2 / (self.n - (0 if biased else 1)) if self.n > 1 else 0.0
        rounding = 1e-6 * self.mean
        return 0.0 if variance <= rounding * rounding else variance


def stats_of(x_K: Tensor, weights_K: Tensor | None = None) -> Stats:
    """Each value counted `weights_K` times; once where that is None."""
    stats = Stats(0, 0.0, 0.0)
    for start in range(0, x_K.numel(), BLOCK):
        x = x_K[start : start + BLOCK].to(torch.float64, copy=True)
        weights = None if weights_K is None else weights_K[start : start + BLOCK]
        n = x.numel() if weights is None else weights.sum().item()
        if n == 0:
            continue
        mean = (x.sum() if weights is None else weights.dot(x)).item() / n
        x -= mean
        m2 = x.dot(x if weights is None else x * weights).item()
        stats = stats.merge(Stats(n, mean, m2))
    return stats


def whiten_stats(x_T: Tensor, mask_T: Tensor) -> Stats:
    """Statistics of `x_T` over the True positions."""
    return stats_of(pick(x_T, mask_T.bool()))


def whiten_(x_K: Tensor, stats: Stats, *, center_only: bool = False, eps: float = 1e-8, biased: bool = False) -> Tensor:
    """(x - mean) / sqrt(variance + eps), in place; exactly 0 where the values are equal, or too large to square."""
    variance = stats.variance(biased=biased)
    if variance == 0.0 or not isfinite(variance):
        return x_K.zero_()
    coarse = torch.tensor(stats.mean, dtype=x_K.dtype).item()  # what fp32 cannot hold of the mean is taken off after it
    x_K.sub_(coarse).sub_(stats.mean - coarse)
    return x_K if center_only else x_K.mul_((variance + eps) ** -0.5)


def whiten(
    x_T: Tensor,
    mask_T: Tensor,
    *,
    stats: Stats | None = None,
    center_only: bool = False,
    eps: float = 1e-8,
    biased: bool = False,
) -> Tensor:
    """`whiten_` on the True positions, 0 elsewhere; `stats` are those of the whole rollout batch where `x_T` is only a
    part of it."""
    mask_T = mask_T.bool()
    x_K = pick(x_T, mask_T)
    stats = stats_of(x_K) if stats is None else stats
    return lay(whiten_(x_K, stats, center_only=center_only, eps=eps, biased=biased), mask_T)
