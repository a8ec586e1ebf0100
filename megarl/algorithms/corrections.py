"""Per-token weights that correct for the mismatch between the engine's log-probs, under which
tokens were sampled, and the trainer's.

    correction_weights(name, tokens, rollout_logprobs_T, **options)

`tokens` are the inputs of the losses. The result [T] is detached and multiplies the per-token
policy loss: 1 leaves a token unchanged, 0 drops it. Divisors still count the whole mask. A rollout
log-prob that is not finite counts as equal to the trainer's. T = positions, N = rows. l = log-prob
under the policy being trained, o = under the trainer's policy before the update, b = under the
engine's policy; w = e^(o - b). Each rule gets `log_ratio_T`, o - b.
"""

import torch
from torch import Tensor

from megarl.algorithms.kl import likelihood_ratio
from megarl.algorithms.losses import Tokens
from megarl.algorithms.rows import Formula, clean


def none(tokens: Tokens, log_ratio_T: Tensor) -> Tensor:
    """Returns 1 for every token: no correction."""
    return torch.ones_like(log_ratio_T)


def tis(tokens: Tokens, log_ratio_T: Tensor, *, cap: float = 2.0, floor: float = 0.0) -> Tensor:
    """Truncated importance sampling: w, at most `cap` and at least `floor`.

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    return likelihood_ratio(log_ratio_T).clamp(floor, cap)


def seq_tis(tokens: Tokens, log_ratio_T: Tensor, *, cap: float = 2.0, floor: float = 0.0) -> Tensor:
    """Truncated importance sampling of rows: w multiplied over the row, from `floor` to `cap`."""
    return tokens.rows.spread(likelihood_ratio(tokens.rows.sum(log_ratio_T)).clamp(floor, cap))


def icepop(tokens: Tokens, log_ratio_T: Tensor, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """IcePop: w where it is in [low, high], otherwise 0. Ring-1T, arXiv 2510.18855."""
    weight_T = likelihood_ratio(log_ratio_T)
    return torch.where((weight_T >= low) & (weight_T <= high), weight_T, 0)


def seq_mask(
    tokens: Tokens, log_ratio_T: Tensor, *, low: float = 0.999, high: float = 1.001
) -> Tensor:
    """Sequence mask: 1 in rows whose geometric mean of w is in [low, high], otherwise 0."""
    mean_N = tokens.rows.mean(log_ratio_T).exp()
    return tokens.rows.spread(((mean_N >= low) & (mean_N <= high)).to(log_ratio_T.dtype))


def opsm(tokens: Tokens, log_ratio_T: Tensor, *, delta: float = 1e-4) -> Tensor:
    """Off-policy sequence masking: 0 for tokens with a negative advantage in off-policy rows.

    A row is off-policy if its mean of b - l exceeds `delta`; all other tokens get 1. This is a
    mask, not an importance weight. b - l includes both staleness and the engine's mismatch.
    DeepSeek-V3.2, arXiv 2512.02556.
    """
    gap_T = tokens.old_logprobs_T - log_ratio_T - tokens.logprobs_T
    is_off_policy_N = tokens.rows.mean(gap_T) > delta
    dropped_T = tokens.rows.spread(is_off_policy_N) & (tokens.advantages_T < 0)
    return (~dropped_T).to(log_ratio_T.dtype)


# the config reads this table (megarl/config/estimators.py)
RULES: dict[str, Formula] = {
    "none": none,
    "tis": tis,
    "seq_tis": seq_tis,
    "icepop": icepop,
    "seq_mask": seq_mask,
    "opsm": opsm,
}


@torch.no_grad()
def correction_weights(
    correction: str, tokens: Tokens, rollout_logprobs_T: Tensor, **options: object
) -> Tensor:
    is_known_T = tokens.mask_T & rollout_logprobs_T.isfinite()
    log_ratio_T = torch.where(is_known_T, tokens.old_logprobs_T - rollout_logprobs_T, 0)
    return clean(RULES[correction](tokens, log_ratio_T, **options), tokens.mask_T)
