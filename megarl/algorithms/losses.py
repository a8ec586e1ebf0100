"""Policy losses, one value a token, unreduced: the caller weighs and sums them (reduce.py). Called as

    LOSSES[name](logprobs_T, old_logprobs_T, advantages_T, mask_T, cu_seqlens, **options) -> loss_T

Inputs are cleaned before any arithmetic, so a False position has loss 0 and gradient 0 whatever lies there.
l = log pi, o = log pi_old, ratio = e^(l - o), A = advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megarl.algorithms.segments import clean

__all__ = ["CLIPPED", "LOSSES"]

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The cleaned inputs of every loss. `logprobs_T` carries the gradient."""

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    cu_seqlens: Tensor

    @property
    def ratio_T(self) -> Tensor:
        log_ratio_T = self.logprobs_T - self.old_logprobs_T
        return log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _per_token(
    rule: Callable[..., Tensor],
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    **options: object,
) -> Tensor:
    mask_T = mask_T.bool()
    logprobs_T, old_logprobs_T, advantages_T = (
        clean(x_T, mask_T) for x_T in (logprobs_T, old_logprobs_T.detach(), advantages_T.detach())
    )
    return rule(_Tokens(logprobs_T, old_logprobs_T, advantages_T, mask_T, cu_seqlens), **options)


def ppo_clip(
    tokens: _Tokens, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0
) -> Tensor:
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)), and at most -A dual_clip where A < 0.

    Schulman et al. 2017; clip-higher: DAPO, arXiv 2503.14476; dual clip: Ye et al. 2020, arXiv 1912.09729.
    """
    ratio_T, advantages_T = tokens.ratio_T, tokens.advantages_T
    loss_T = torch.maximum(-advantages_T * ratio_T, -advantages_T * ratio_T.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is None:
        return loss_T
    return torch.where(advantages_T < 0, torch.minimum(loss_T, -advantages_T * dual_clip), loss_T)


def ppo_clipped(
    tokens: _Tokens, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0
) -> Tensor:
    """[T] bool: the clip (or dual clip) took this token's gradient."""
    ratio_T, advantages_T = tokens.ratio_T, tokens.advantages_T
    too_low_T, too_high_T = ratio_T < 1 - clip_low, ratio_T > (dual_clip or float("inf"))
    return torch.where(advantages_T > 0, ratio_T > 1 + clip_high, (advantages_T < 0) & (too_low_T | too_high_T))


def reinforce(tokens: _Tokens) -> Tensor:
    """-A l: the plain policy gradient; `old_logprobs_T` is not looked at."""
    return -tokens.advantages_T * tokens.logprobs_T


def sft(tokens: _Tokens) -> Tensor:
    """-l: maximum likelihood of the labels."""
    return -tokens.logprobs_T


_RULES: dict[str, Callable[..., Tensor]] = {"ppo_clip": ppo_clip, "reinforce": reinforce, "sft": sft}
LOSSES: dict[str, partial[Tensor]] = {name: partial(_per_token, rule) for name, rule in _RULES.items()}

# Same arguments as the loss; [T] bool, for the losses that clip.
CLIPPED: dict[str, Callable[..., Tensor]] = {"ppo_clip": partial(_per_token, ppo_clipped)}
