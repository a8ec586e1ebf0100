"""Whitening of advantages over the whole rollout batch, every trained token counted once.

Statistics are fp64 and merge (Chan et al. 1983), so any sharding of the rows gives the same
numbers. T = positions, K = True positions.
"""

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from megarl.algorithms.rows import at_least_fp32, clean


@dataclass(frozen=True)
class Stats:
    """Count, mean, and sum of squared deviations from that mean."""

    n: float
    mean: float
    m2: float

    def merge(self, other: "Stats") -> "Stats":
        """Returns the statistics of both sets of values together."""
        if self.n == 0:
            return other
        if other.n == 0:
            return self
        n = self.n + other.n
        delta = other.mean - self.mean
        return Stats(
            n,
            self.mean + delta * other.n / n,
            self.m2 + other.m2 + delta * delta * self.n * other.n / n,
        )

    def variance(self, *, biased: bool = False) -> float:
        """Returns the variance; 0 for fewer than two values or if they differ only by rounding."""
        variance = self.m2 / (self.n - (0 if biased else 1)) if self.n > 1 else 0.0
        rounding = 1e-6 * self.mean
        return 0.0 if variance <= rounding * rounding else variance


def whiten_stats(x_T: Tensor, mask_T: Tensor) -> Stats:
    """Returns the statistics of `x_T` over the True positions, computed in two passes.

    An integer mask gives the number of times that each value counts.
    """
    is_counted_T = mask_T.bool()
    x_K = x_T.detach()[is_counted_T].double()
    count_K = mask_T[is_counted_T].double()
    if not x_K.numel():
        return Stats(0, 0.0, 0.0)
    n = float(count_K.sum())
    mean = float(x_K.dot(count_K)) / n
    x_K -= mean
    return Stats(n, mean, float((x_K * count_K).dot(x_K)))


def whiten(
    x_T: Tensor,
    mask_T: Tensor,
    *,
    eps: float = 1e-8,
    biased: bool = False,
) -> Tensor:
    """Returns (x - mean) / sqrt(variance + eps) on the True positions, 0 elsewhere; fp32 at least.

    `biased`: the variance divides by n, not by n - 1. Values that are all equal, or too large to
    square, become exactly 0.
    """
    dtype = at_least_fp32(x_T.dtype)
    stats = whiten_stats(x_T, mask_T)
    variance = stats.variance(biased=biased)
    if variance == 0.0 or not isfinite(variance):
        return torch.zeros_like(x_T, dtype=dtype)
    x_T = (x_T.detach().double() - stats.mean) * (variance + eps) ** -0.5
    return clean(x_T.to(dtype), mask_T.bool())
