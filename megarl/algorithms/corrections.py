"""Per-token weights that correct for the mismatch between the engine's log-probs, under which
tokens were sampled, and the trainer's.

    CORRECTIONS[name](
        old_logprobs_T, rollout_logprobs_T, mask_T, cu_seqlens, *, logprobs_T, advantages_T,
        **options
    )

The result [T] is detached and multiplies the per-token policy loss: 1 leaves a token unchanged, 0
drops it. Divisors still count the whole mask. A rollout log-prob that is not finite counts as equal
to the trainer's. T = positions, N = rows. l = log-prob under the policy being trained, o =
under the trainer's policy before the update, b = under the engine's policy; w = e^(o - b).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megarl.algorithms.kl import likelihood_ratio
from megarl.algorithms.rows import Rows, clean


@dataclass(frozen=True)
class _Gap:
    """Inputs of every correction; the fields before `logprobs_T` are clean."""

    mask_T: Tensor
    cu_seqlens: Tensor
    log_ratio_T: Tensor  # o - b
    rollout_logprobs_T: Tensor  # b
    logprobs_T: Tensor | None
    advantages_T: Tensor | None

    @property
    def rows(self) -> Rows:
        return Rows.of(self.mask_T, self.cu_seqlens)


@torch.no_grad()
def _weights(
    rule: Callable[..., Tensor],
    old_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    *,
    logprobs_T: Tensor | None = None,
    advantages_T: Tensor | None = None,
    **options: object,
) -> Tensor:
    mask_T = mask_T.bool()
    old_T = clean(old_logprobs_T, mask_T)
    rollout_T = torch.where(mask_T & rollout_logprobs_T.isfinite(), rollout_logprobs_T, old_T)
    gap = _Gap(mask_T, cu_seqlens, old_T - rollout_T, rollout_T, logprobs_T, advantages_T)
    return clean(rule(gap, **options), mask_T)


def none(gap: _Gap) -> Tensor:
    """Returns 1 for every token: no correction."""
    return torch.ones_like(gap.log_ratio_T)


def tis(gap: _Gap, *, cap: float = 2.0, floor: float = 0.0) -> Tensor:
    """Truncated importance sampling: w, at most `cap` and at least `floor`.

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    return likelihood_ratio(gap.log_ratio_T).clamp(floor, cap)


def seq_tis(gap: _Gap, *, cap: float = 2.0, floor: float = 0.0) -> Tensor:
    """Truncated importance sampling of rows: w multiplied over the row, from `floor` to `cap`."""
    return gap.rows.spread(likelihood_ratio(gap.rows.sum(gap.log_ratio_T)).clamp(floor, cap))


def icepop(gap: _Gap, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """IcePop: w where it is in [low, high], otherwise 0. Ring-1T, arXiv 2510.18855."""
    weight_T = likelihood_ratio(gap.log_ratio_T)
    return torch.where((weight_T >= low) & (weight_T <= high), weight_T, 0)


def seq_mask(gap: _Gap, *, low: float = 0.999, high: float = 1.001) -> Tensor:
    """Sequence mask: 1 in rows whose geometric mean of w is in [low, high], otherwise 0."""
    mean_N = gap.rows.mean(gap.log_ratio_T).exp()
    return gap.rows.spread(((mean_N >= low) & (mean_N <= high)).to(gap.log_ratio_T.dtype))


def opsm(gap: _Gap, *, delta: float = 1e-4) -> Tensor:
    """Off-policy sequence masking: 0 for tokens with a negative advantage in off-policy rows.

    A row is off-policy if its mean of b - l exceeds `delta`; all other tokens get 1. This is a
    mask, not an importance weight. b - l includes both staleness and the engine's mismatch.
    DeepSeek-V3.2, arXiv 2512.02556.
    """
    if gap.logprobs_T is None or gap.advantages_T is None:
        raise ValueError("correction=opsm needs logprobs_T and advantages_T")
    is_off_policy_N = gap.rows.mean(gap.rollout_logprobs_T - gap.logprobs_T) > delta
    dropped_T = gap.rows.spread(is_off_policy_N) & (gap.advantages_T < 0)
    return (~dropped_T).to(gap.log_ratio_T.dtype)


# the config reads this table (megarl/config/estimators.py)
RULES: dict[str, Callable[..., Tensor]] = {
    "none": none,
    "tis": tis,
    "seq_tis": seq_tis,
    "icepop": icepop,
    "seq_mask": seq_mask,
    "opsm": opsm,
}
CORRECTIONS = {name: partial(_weights, rule) for name, rule in RULES.items()}
