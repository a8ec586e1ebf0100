"""Estimators of KL(policy || reference) from tokens the policy sampled. delta = log pi - log ref.

| name | value              | gradient to log pi | expected gradient            |
| k1   | delta              | 1                  | 0: of no use as a loss       |
| k2   | delta^2 / 2        | delta              | that of KL(policy || ref)    |
| k3   | e^-delta - 1 + delta | 1 - e^-delta     | that of KL(ref || policy)    |
| k3+  | that of k3         | delta              | that of KL(policy || ref)    |

Schulman, "Approximating KL Divergence", 2020. No mask here: the caller cleans both inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algorithms.rows import at_least_fp32

__all__ = ["KL", "adapt"]

LOG_RATIO_LIMIT = 20.0  # e^20 still fits fp32 with room for sums; only the exponent is limited


def k1(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    dtype = at_least_fp32(logprobs_T.dtype)
    return logprobs_T.to(dtype) - ref_logprobs_T.to(dtype)


def k2(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    return k1(logprobs_T, ref_logprobs_T).square() / 2


def k3(logprobs_T: Tensor, ref_logprobs_T: Tensor, *, value_clamp: float | None = None) -> Tensor:
    """`value_clamp` 10 is what several trainers do; there the gradient is 0 where the policy is furthest away."""
    delta_T = k1(logprobs_T, ref_logprobs_T)
    value_T = torch.expm1((-delta_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) + delta_T
    return value_T if value_clamp is None else value_T.clamp(-value_clamp, value_clamp)


def k3_plus(logprobs_T: Tensor, ref_logprobs_T: Tensor, *, value_clamp: float | None = None) -> Tensor:
    value_T = k3(logprobs_T, ref_logprobs_T, value_clamp=value_clamp).detach()
    slope_T = k2(logprobs_T, ref_logprobs_T)
    return value_T + (slope_T - slope_T.detach())


def absolute(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    return k1(logprobs_T, ref_logprobs_T).abs()


KL: dict[str, Callable[..., Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_plus, "abs": absolute}


def adapt(coef: float, kl: float, *, target: float, horizon: float, num_samples: int) -> float:
    """The coefficient after a batch of `num_samples` rows whose KL was `kl`, in the unit of `target`: it moves by at
    most a fifth over `horizon` rows, towards more penalty where `kl` > `target`. Ziegler et al. 2019,
    arXiv 1909.08593. A KL that is not finite changes nothing."""
    if not math.isfinite(kl):
        return coef
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * num_samples / horizon)
