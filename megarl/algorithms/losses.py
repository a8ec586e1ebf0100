"""Policy and value losses, one value per token, unreduced; aggregation.py weighs and sums them.

    tokens = Tokens.of(logprobs_T, old_logprobs_T, advantages_T, mask_T, cu_seqlens)
    loss_and_clip(name, tokens, **options) -> loss_T, clipped_T [T] bool
    SELECT[name](tokens, *, generator=None, **options) -> select_T [T] bool

T = positions, N = rows. `Tokens.of` cleans inputs before any arithmetic, so a False position has
loss 0 and gradient 0 whatever its values. l = log pi, o = log pi_old, ratio = e^(l - o), A =
advantage, sg = stop gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.kl import likelihood_ratio
from megarl.algorithms.rows import Formula, Rows, at_least_fp32, clean

LossAndClip = tuple[Tensor, Tensor]  # [T]; [T] bool: the clip removes the token's gradient
ROUNDING = 1e-5  # nats: two fp32 forward passes of the same weights differ by less


@dataclass(frozen=True)
class Tokens:
    """Clean inputs of losses and selections, at least fp32; `logprobs_T` carries the gradient."""

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    cu_seqlens: Tensor

    @classmethod
    def of(
        cls,
        logprobs_T: Tensor,
        old_logprobs_T: Tensor,
        advantages_T: Tensor,
        mask_T: Tensor,
        cu_seqlens: Tensor,
    ) -> "Tokens":
        dtype = at_least_fp32(logprobs_T.dtype)
        mask_T = mask_T.bool()
        inputs = (logprobs_T, old_logprobs_T.detach(), advantages_T.detach())
        new_T, old_T, advantages_T = (clean(x_T.to(dtype), mask_T) for x_T in inputs)
        return cls(new_T, old_T, advantages_T, mask_T, cu_seqlens)

    @property
    def rows(self) -> Rows:
        return Rows.of(self.mask_T, self.cu_seqlens)

    @property
    def log_ratio_T(self) -> Tensor:
        return self.logprobs_T - self.old_logprobs_T

    @property
    def ratio_T(self) -> Tensor:
        return likelihood_ratio(self.log_ratio_T)


def reinforce(tokens: Tokens) -> Tensor:
    """REINFORCE: -A l. Does not depend on the old log-probs. Williams 1992."""
    return -tokens.advantages_T * tokens.logprobs_T


def sft(tokens: Tokens) -> Tensor:
    """Supervised fine-tuning: -l, the negative log-likelihood of the labels."""
    return -tokens.logprobs_T


def ppo_clip(
    tokens: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    ratio: str = "token",
) -> LossAndClip:
    """PPO-clip: max(-A ratio, -A clip(ratio, 1 - low, 1 + high)).

    Where A < 0, the loss is at most -A dual_clip. Schulman et al. 2017, arXiv 1707.06347;
    clip-higher: DAPO, arXiv 2503.14476; dual clip: Ye et al. 2020, arXiv 1912.09729. With `ratio`
    "sequence", each token's ratio is that of its row, pi(row) / pi_old(row), as in RLOO, arXiv
    2402.14740.
    """
    if ratio not in ("token", "sequence"):
        raise ValueError(f"ratio={ratio!r} is not one of token, sequence")
    ratio_T = tokens.ratio_T
    if ratio == "sequence":
        ratio_T = likelihood_ratio(tokens.rows.spread(tokens.rows.sum(tokens.log_ratio_T)))
    return _clip(ratio_T, tokens.advantages_T, clip_low, clip_high, dual_clip)


def _clip(
    ratio_T: Tensor,
    advantages_T: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> LossAndClip:
    loss_T = torch.maximum(
        -advantages_T * ratio_T, -advantages_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)
    )
    clipped_T = _beyond_bound(ratio_T, advantages_T, clip_low, clip_high)
    if dual_clip is not None:
        loss_T = torch.where(
            advantages_T < 0, torch.minimum(loss_T, -advantages_T * dual_clip), loss_T
        )
        clipped_T = clipped_T | ((advantages_T < 0) & (ratio_T > dual_clip))
    return loss_T, clipped_T


def _beyond_bound(
    ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Returns [T] bool: True where the ratio is beyond the bound that A pushes it towards."""
    return torch.where(
        advantages_T > 0, ratio_T > 1 + clip_high, (advantages_T < 0) & (ratio_T < 1 - clip_low)
    )


def gspo(tokens: Tokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossAndClip:
    """GSPO: PPO-clip of the row's ratio s = e^(mean of l - o), with one advantage per row.

    arXiv 2507.18071. The token form sg[s] e^(l - sg[l]) of section 4.3 is used: with equal
    advantages, its value and gradient are those of s, and a weight on one token affects only that
    token.
    """
    rows = tokens.rows
    advantages_T = tokens.advantages_T
    uneven_T = (
        advantages_T - rows.spread(rows.mean(advantages_T))
    ).abs() > 1e-4 * advantages_T.abs().clamp(min=1)
    # On a GPU, the check would synchronise in every micro-batch. Validation of the config refuses
    # advantages that can differ within a row.
    if not uneven_T.is_cuda and bool((uneven_T & tokens.mask_T).any()):
        raise ValueError(
            "loss=gspo needs one advantage per row, but these differ within a row; use grpo or rloo"
        )
    log_s_T = rows.spread(rows.mean(tokens.log_ratio_T.detach()))
    ratio_T = likelihood_ratio(log_s_T + (tokens.logprobs_T - tokens.logprobs_T.detach()))
    return _clip(ratio_T, advantages_T, clip_low, clip_high)


def cispo(tokens: Tokens, *, clip_low: float = 1.0, clip_high: float = 4.0) -> LossAndClip:
    """CISPO: -sg[clip(ratio, 1 - low, 1 + high)] A l; every token keeps its gradient.

    MiniMax-M1, arXiv 2506.13585.
    """
    clipped_T = tokens.mask_T & ((tokens.ratio_T < 1 - clip_low) | (tokens.ratio_T > 1 + clip_high))
    loss_T = (
        -tokens.ratio_T.detach().clamp(1 - clip_low, 1 + clip_high)
        * tokens.advantages_T
        * tokens.logprobs_T
    )
    return loss_T, clipped_T


def sapo(tokens: Tokens, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Tensor:
    """SAPO: -A (4 / tau) sigmoid(tau (ratio - 1)), a soft gate; tau depends on the sign of A.

    arXiv 2511.20347.
    """
    tau_T = torch.where(tokens.advantages_T > 0, tau_pos, tau_neg)
    return -tokens.advantages_T * torch.sigmoid(tau_T * (tokens.ratio_T - 1)) * 4 / tau_T


def gmpo(tokens: Tokens, *, clip_low: float = 0.4, clip_high: float = 0.4) -> LossAndClip:
    """GMPO: -A e^(mean of l - o), with each l - o clipped on the side that A pushes it towards.

    The bounds are [-low, high]. arXiv 2507.20673.
    """
    rows = tokens.rows
    log_ratio_T = tokens.log_ratio_T
    sign_T = tokens.advantages_T.sign()
    bounded_T = sign_T * torch.minimum(
        sign_T * log_ratio_T, sign_T * log_ratio_T.clamp(-clip_low, clip_high)
    )
    loss_T = rows.spread(-rows.mean(tokens.advantages_T) * likelihood_ratio(rows.mean(bounded_T)))
    return loss_T, _beyond_bound(1 + log_ratio_T, tokens.advantages_T, clip_low, clip_high)


def clip_cov(
    tokens: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    select_T: Tensor | None = None,
) -> LossAndClip:
    """Clip-Cov: PPO-clip, but 0 for tokens that SELECT["clip_cov"] chose. arXiv 2505.22617."""
    loss_T, clipped_T = _clip(tokens.ratio_T, tokens.advantages_T, clip_low, clip_high)
    return loss_T if select_T is None else loss_T.masked_fill(select_T, 0), clipped_T


def kl_cov(tokens: Tokens, *, kl_coef: float = 0.1, select_T: Tensor | None = None) -> Tensor:
    """KL-Cov: -A ratio, plus coef |l - o| on the tokens that SELECT["kl_cov"] chose.

    arXiv 2505.22617.
    """
    loss_T = -tokens.advantages_T * tokens.ratio_T
    if select_T is None:
        return loss_T
    gap_T = tokens.log_ratio_T
    # before the first update the gap is only rounding; its sign would become the gradient
    gap_T = torch.where(gap_T.abs() < ROUNDING, gap_T.detach(), gap_T)
    return loss_T + clean(kl_coef * gap_T.abs(), select_T)


_Rule = Callable[..., Tensor | LossAndClip]


# The config reads this table (megarl/config/estimators.py). A new loss needs a function above and a
# line here.
RULES: dict[str, _Rule] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "gpg": reinforce,  # GPG differs in the factor on its advantages
    "sapo": sapo,
    "gmpo": gmpo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "sft": sft,
}


def loss_and_clip(loss: str, tokens: Tokens, **options: object) -> LossAndClip:
    """Returns the loss `loss` of each token; without a clip, no token is clipped."""
    result = RULES[loss](tokens, **options)
    return result if isinstance(result, tuple) else (result, torch.zeros_like(tokens.mask_T))


def clipped_value_loss(
    values_T: Tensor,
    old_values_T: Tensor,
    returns_T: Tensor,
    mask_T: Tensor,
    *,
    clip: float | None = 0.2,
) -> Tensor:
    """Returns [T]: max((V - R)^2, (V_old + clip(V - V_old) - R)^2) / 2.

    If `clip` is None, it is (V - R)^2 / 2.
    """
    mask_T = mask_T.bool()
    values_T, old_T, returns_T = (
        clean(x, mask_T) for x in (values_T, old_values_T.detach(), returns_T.detach())
    )
    squared_T = (values_T - returns_T).square()
    if clip is None:
        return squared_T / 2
    return (
        torch.maximum(
            squared_T, (old_T + (values_T - old_T).clamp(-clip, clip) - returns_T).square()
        )
        / 2
    )


# Selection, once per update: entropy falls because of the tokens whose advantage and log-prob
# covary most. C = candidates.


def select_clip_cov(
    tokens: Tokens,
    *,
    generator: torch.Generator | None = None,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Returns [T] bool: a random choice of at most `share` of the tokens, or one if that is none.

    The candidates are tokens that are not clipped and whose covariance is in (low, high).
    """
    clipped_T = _beyond_bound(tokens.ratio_T, tokens.advantages_T, clip_low, clip_high)
    covariance_T = _covariance(tokens)
    candidates_C = ((covariance_T > low) & (covariance_T < high) & ~clipped_T).nonzero().flatten()
    num_chosen = max(int(share * int(tokens.mask_T.sum())), 1)
    order_C = torch.randperm(candidates_C.numel(), generator=generator, device=candidates_C.device)
    return torch.zeros_like(tokens.mask_T).index_fill(0, candidates_C[order_C[:num_chosen]], True)


def select_kl_cov(
    tokens: Tokens, *, generator: torch.Generator | None = None, share: float = 2e-4
) -> Tensor:
    """Returns [T] bool: the `share` of tokens with the largest covariance, at least one."""
    num_tokens = int(tokens.mask_T.sum())
    num_chosen = min(max(int(share * num_tokens), 1), num_tokens)
    covariance_T = _covariance(tokens)
    return torch.zeros_like(tokens.mask_T).index_fill(
        0, covariance_T.topk(num_chosen).indices, True
    )


def _covariance(tokens: Tokens) -> Tensor:
    """Returns [T] fp64: (A - mean A)(l - mean l) on True positions, -inf elsewhere."""
    logprobs_T = tokens.logprobs_T.detach().double()
    advantages_T = tokens.advantages_T.double()
    num_tokens = tokens.mask_T.sum().clamp(min=1)
    product_T = (advantages_T - advantages_T.sum() / num_tokens) * (
        logprobs_T - logprobs_T.sum() / num_tokens
    )
    return product_T.masked_fill(~tokens.mask_T, float("-inf"))


SELECT: dict[str, Formula] = {"clip_cov": select_clip_cov, "kl_cov": select_kl_cov}
