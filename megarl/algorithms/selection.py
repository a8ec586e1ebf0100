"""Selects the tokens whose advantage and log-prob covary most, which are those that lower entropy: arXiv 2505.22617.

    SELECT[name](logprobs_T, old_logprobs_T, advantages_T, mask_T, *, generator=None, **options) -> select_T [T] bool

is called on the whole batch, once per update; the loss of the same name treats the chosen tokens differently.
T = positions, C = candidates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algorithms.kl import LOG_RATIO_LIMIT
from megarl.algorithms.rows import clean


def _covariance(logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor) -> Tensor:
    """(A - mean A)(l - mean l) over the True positions; -inf elsewhere."""
    logprobs_T, advantages_T = (clean(x_T.detach(), mask_T).double() for x_T in (logprobs_T, advantages_T))
    num_tokens = mask_T.sum().clamp(min=1)
    product_T = (advantages_T - advantages_T.sum() / num_tokens) * (logprobs_T - logprobs_T.sum() / num_tokens)
    return product_T.masked_fill(~mask_T, float("-inf"))


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
    """At most `share` of the tokens, at least one, drawn from those with covariance in (low, high) that the clip does
    not affect."""
    mask_T = mask_T.bool()
    log_ratio_T, advantages_T = clean((logprobs_T - old_logprobs_T).detach(), mask_T), clean(advantages_T, mask_T)
    ratio_T = log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    clipped_T = -advantages_T * ratio_T.clamp(1 - clip_low, 1 + clip_high) > -advantages_T * ratio_T
    covariance_T = _covariance(logprobs_T, advantages_T, mask_T)
    candidates_C = ((covariance_T > low) & (covariance_T < high) & ~clipped_T).nonzero().flatten()
    num_chosen = min(max(int(share * int(mask_T.sum())), 1), candidates_C.numel())
    order_C = torch.randperm(candidates_C.numel(), generator=generator, device=candidates_C.device)
    return torch.zeros_like(mask_T).index_fill(0, candidates_C[order_C[:num_chosen]], True)


def kl_cov(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    generator: torch.Generator | None = None,
    share: float = 2e-4,
) -> Tensor:
    """The `share` of tokens with the largest covariance, at least one."""
    mask_T = mask_T.bool()
    num_tokens = int(mask_T.sum())
    if num_tokens == 0:
        return torch.zeros_like(mask_T)
    chosen = _covariance(logprobs_T, advantages_T, mask_T).topk(max(int(share * num_tokens), 1)).indices
    return torch.zeros_like(mask_T).index_fill(0, chosen, True)


SELECT: dict[str, Callable[..., Tensor]] = {"clip_cov": clip_cov, "kl_cov": kl_cov}
