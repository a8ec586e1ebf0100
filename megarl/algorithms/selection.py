"""Tokens whose advantage and log-prob rise together, which is what lowers entropy: arXiv 2505.22617. Called as

    SELECT[name](logprobs_T, old_logprobs_T, advantages_T, mask_T, *, generator=None, **options) -> select_T [T] bool

over the whole batch, once an update; the loss of the same name treats the chosen tokens apart.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algorithms.rows import clean

__all__ = ["SELECT"]


def _covariance(logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor) -> Tensor:
    """(A - mean A)(l - mean l) over the True positions; -inf elsewhere."""
    centred = []
    for x_T in (logprobs_T, advantages_T):
        clean_T = clean(x_T.detach(), mask_T).double()
        centred.append(clean_T - clean_T.sum() / mask_T.sum().clamp(min=1))
    return torch.where(mask_T, centred[0] * centred[1], float("-inf"))


def clip_cov(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    generator: torch.Generator | None = None,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """At most `share` of the tokens, drawn from those with covariance in (low, high) that the clip does not act on."""
    mask_T = mask_T.bool()
    log_ratio_T = clean(logprobs_T - old_logprobs_T, mask_T).clamp(-20.0, 20.0).detach()
    advantage_T, ratio_T = clean(advantages_T, mask_T), log_ratio_T.exp()
    clipped_T = -advantage_T * ratio_T.clamp(1 - clip_low, 1 + clip_high) > -advantage_T * ratio_T
    covariance_T = _covariance(logprobs_T, advantages_T, mask_T)
    candidates = ((covariance_T > low) & (covariance_T < high) & ~clipped_T).nonzero().flatten()
    count = min(max(int(share * int(mask_T.sum())), 1), candidates.numel())
    order = torch.randperm(candidates.numel(), generator=generator, device=candidates.device)
    return torch.zeros_like(mask_T).index_fill_(0, candidates[order[:count]], True)


def kl_cov(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    generator: torch.Generator | None = None,
    share: float = 2e-4,
) -> Tensor:
    """The `share` of tokens with the largest covariance, one at least."""
    mask_T = mask_T.bool()
    num_tokens = int(mask_T.sum())
    if num_tokens == 0:
        return torch.zeros_like(mask_T)
    largest = _covariance(logprobs_T, advantages_T, mask_T).topk(max(int(share * num_tokens), 1)).indices
    return torch.zeros_like(mask_T).index_fill_(0, largest, True)


SELECT: dict[str, Callable[..., Tensor]] = {"clip_cov": clip_cov, "kl_cov": kl_cov}
