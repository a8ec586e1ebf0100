"""Estimators of KL(policy || reference) from tokens the policy sampled. delta = log pi - log ref.

| name | value              | gradient to log pi | expected gradient            |
| k1   | delta              | 1                  | 0: useless as a loss         |
| k2   | delta^2 / 2        | delta              | that of KL(policy || ref)    |
| k3   | e^-delta - 1 + delta | 1 - e^-delta     | that of KL(ref || policy)    |
| k3+  | that of k3         | delta              | that of KL(policy || ref)    |

Schulman, "Approximating KL Divergence", 2020. T = positions. There is no mask: the caller cleans both inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algorithms.rows import at_least_fp32

LOG_RATIO_LIMIT = 20.0  # e^20 still fits fp32 with room for sums


def likelihood_ratio(log_ratio: Tensor) -> Tensor:
    """e^log_ratio; beyond the limit its value is that at the limit, without gradient."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def k1(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """delta."""
    dtype = at_least_fp32(logprobs_T.dtype)
    return logprobs_T.to(dtype) - ref_logprobs_T.to(dtype)


def k2(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """delta^2 / 2."""
    return k1(logprobs_T, ref_logprobs_T).square() / 2


def k3(logprobs_T: Tensor, ref_logprobs_T: Tensor, *, value_clamp: float | None = None) -> Tensor:
    """e^-delta - 1 + delta, clamped to +-`value_clamp`. Where it is clamped the gradient is 0, just where the
    policy is furthest from the reference; several trainers clamp to 10."""
    delta_T = k1(logprobs_T, ref_logprobs_T)
    value_T = torch.expm1((-delta_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) + delta_T
    return value_T if value_clamp is None else value_T.clamp(-value_clamp, value_clamp)


def k3_plus(logprobs_T: Tensor, ref_logprobs_T: Tensor, *, value_clamp: float | None = None) -> Tensor:
    """The value of k3 with the gradient of k2."""
    value_T, k2_T = k3(logprobs_T, ref_logprobs_T, value_clamp=value_clamp), k2(logprobs_T, ref_logprobs_T)
    return value_T.detach() + (k2_T - k2_T.detach())


def absolute(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """|delta|."""
    return k1(logprobs_T, ref_logprobs_T).abs()


KL: dict[str, Callable[..., Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_plus, "abs": absolute}


def adapt(coef: float, kl: float, *, target: float, horizon: float, num_samples: int) -> float:
    """The KL coefficient after a batch of `num_samples` rows with mean KL `kl`, in the unit of `target`.

    It grows if `kl` > `target` and shrinks if `kl` is less, by at most a fifth over `horizon` rows. A `kl` that is
    not finite leaves it unchanged. Ziegler et al. 2019, arXiv 1909.08593, section 2.2.
    """
    if not math.isfinite(kl):
        return coef
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * num_samples / horizon)
