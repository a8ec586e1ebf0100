"""Policy losses, one value a token, unreduced: the caller weighs and sums them (reduce.py). Called as

    LOSSES[name](logprobs_T, old_logprobs_T, advantages_T, mask_T, cu_seqlens, **options) -> loss_T

Inputs are cleaned before any arithmetic, so a False position has loss 0 and gradient 0 whatever lies there.
l = log pi, o = log pi_old, ratio = e^(l - o), A = advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from megarl.algorithms.rows import Rows, at_least_fp32, clean

__all__ = ["CLIPPED", "LOSSES", "VALUE_LOSSES"]

LOG_RATIO_LIMIT = 20.0
ROUNDING = 1e-5  # nats: two fp32 forward passes of the same weights differ by less


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The inputs of every loss, in fp32 at least. The two given ones may hold anything on False positions."""

    given_logprobs_T: Tensor  # carries the gradient
    given_old_T: Tensor
    advantages_T: Tensor  # clean
    mask_T: Tensor
    cu_seqlens: Tensor

    @property
    def logprobs_T(self) -> Tensor:
        return clean(self.given_logprobs_T, self.mask_T)

    @property
    def log_ratio_T(self) -> Tensor:
        return clean(self.given_logprobs_T - self.given_old_T, self.mask_T)

    @property
    def ratio_T(self) -> Tensor:
        return self.log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _per_token(
    rule: Callable[..., Tensor],
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    **options: object,
) -> Tensor:
    dtype, mask_T = at_least_fp32(logprobs_T.dtype), mask_T.bool()
    advantages_T = clean(advantages_T.detach(), mask_T).to(dtype)
    given = (logprobs_T.to(dtype), old_logprobs_T.detach().to(dtype))
    return rule(_Tokens(*given, advantages_T, mask_T, cu_seqlens), **options)


class _Clipped(torch.autograd.Function):
    """-A times the ratio, bounded on the side that A pushes it to. Kept for the gradient is the loss and a bit a token:
    d loss / d log-ratio is the loss itself where no bound acts, else 0."""

    @staticmethod
    def forward(
        ctx: Any, log_ratio_T: Tensor, advantages_T: Tensor, low: float, high: float, dual: float | None
    ) -> Tensor:
        ratio_T = log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        is_free_T = ratio_T == log_ratio_T
        ratio_T = ratio_T.exp_()
        loss_T = torch.where(advantages_T > 0, ratio_T.clamp(max=1 + high), ratio_T.clamp(1 - low, dual))
        is_free_T &= ratio_T == loss_T
        loss_T.mul_(advantages_T).neg_()
        ctx.save_for_backward(loss_T, is_free_T)
        return loss_T

    @staticmethod
    def backward(ctx: Any, *grad_T: Tensor) -> tuple[Tensor | None, ...]:
        loss_T, is_free_T = ctx.saved_tensors
        return clean(grad_T[0] * loss_T, is_free_T), None, None, None, None


def ppo_clip(
    tokens: _Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    ratio: Literal["token", "sequence"] = "token",
) -> Tensor:
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)), and at most -A dual_clip where A < 0.

    Schulman et al. 2017; clip-higher: DAPO, arXiv 2503.14476; dual clip: Ye et al. 2020, arXiv 1912.09729. With
    `ratio` "sequence" each token's is that of its whole row, pi(row) / pi_old(row): RLOO, arXiv 2402.14740.
    """
    return _Clipped.apply(_log_ratio(tokens, ratio), tokens.advantages_T, clip_low, clip_high, dual_clip)


def _log_ratio(tokens: _Tokens, ratio: str) -> Tensor:
    if ratio not in ("token", "sequence"):
        raise ValueError(f"ratio={ratio!r} is not one of token, sequence")
    if ratio == "token":
        return tokens.log_ratio_T
    rows = Rows.of(tokens.mask_T, tokens.cu_seqlens)
    return rows.spread(rows.sum(tokens.log_ratio_T))


def ppo_clipped(
    tokens: _Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    ratio: Literal["token", "sequence"] = "token",
) -> Tensor:
    """[T] bool: the clip (or dual clip) took this token's gradient."""
    ratio_T = _log_ratio(tokens, ratio).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    too_high_T = (tokens.advantages_T < 0) & (ratio_T > (dual_clip or float("inf")))
    return _clips(ratio_T, tokens.advantages_T, clip_low, clip_high) | too_high_T


def reinforce(tokens: _Tokens) -> Tensor:
    """-A l: the plain policy gradient; `old_logprobs_T` is not looked at."""
    return -tokens.advantages_T * tokens.logprobs_T


def sft(tokens: _Tokens) -> Tensor:
    """-l: maximum likelihood of the labels."""
    return -tokens.logprobs_T


def gspo(tokens: _Tokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Tensor:
    """PPO-clip of the row's ratio s = e^(mean log-ratio): arXiv 2507.18071. One advantage a row.

    In token form, sg[s] e^(l - sg[l]): with equal advantages its value and gradient are those of s, and a
    weight on one token weighs that token only.
    """
    rows = Rows.of(tokens.mask_T, tokens.cu_seqlens)
    advantages_T = tokens.advantages_T
    uneven_T = (advantages_T - rows.spread(rows.mean(advantages_T))).abs() > 1e-4 * advantages_T.abs().clamp(min=1)
    if bool((uneven_T & tokens.mask_T).any()):
        raise ValueError("loss=gspo needs one advantage a row, as grpo or rloo give; these differ within a row")
    return _Clipped.apply(_row_log_ratio(tokens, rows), advantages_T, clip_low, clip_high, None)


def _row_log_ratio(tokens: _Tokens, rows: Rows) -> Tensor:
    """[T]: log s of each token's row, with the gradient of the token's own log-prob."""
    log_ratio_T = tokens.log_ratio_T
    return rows.spread(rows.mean(log_ratio_T.detach())) + (log_ratio_T - log_ratio_T.detach())


def gspo_clipped(tokens: _Tokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Tensor:
    rows = Rows.of(tokens.mask_T, tokens.cu_seqlens)
    ratio_T = _row_log_ratio(tokens, rows).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return _clips(ratio_T, tokens.advantages_T, clip_low, clip_high)


def _clips(ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """[T] bool: the ratio is beyond the bound its advantage pushes to."""
    return torch.where(advantages_T > 0, ratio_T > 1 + clip_high, (advantages_T < 0) & (ratio_T < 1 - clip_low))


def cispo(tokens: _Tokens, *, clip_low: float = 1.0, clip_high: float = 4.0) -> Tensor:
    """-sg[clip(ratio, 1 - low, 1 + high)] A l: every token keeps its gradient (MiniMax-M1, arXiv 2506.13585)."""
    return -tokens.ratio_T.detach().clamp(1 - clip_low, 1 + clip_high) * tokens.advantages_T * tokens.logprobs_T


def cispo_clipped(tokens: _Tokens, *, clip_low: float = 1.0, clip_high: float = 4.0) -> Tensor:
    """[T] bool: the weight is not the ratio; the gradient stays."""
    return tokens.mask_T & ((tokens.ratio_T < 1 - clip_low) | (tokens.ratio_T > 1 + clip_high))


def sapo(tokens: _Tokens, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Tensor:
    """-A (4 / tau) sigmoid(tau (ratio - 1)): a soft gate in place of the clip (arXiv 2511.20347)."""
    tau_T = torch.where(tokens.advantages_T > 0, tau_pos, tau_neg)
    return -tokens.advantages_T * torch.sigmoid(tau_T * (tokens.ratio_T - 1)) * 4 / tau_T


def gmpo(tokens: _Tokens, *, clip_low: float = 0.4, clip_high: float = 0.4) -> Tensor:
    """-A e^(mean of log-ratios, each clipped on the side its advantage pushes to): arXiv 2507.20673."""
    rows = Rows.of(tokens.mask_T, tokens.cu_seqlens)
    log_ratio_T, sign_T = tokens.log_ratio_T, tokens.advantages_T.sign()
    clipped_T = sign_T * torch.minimum(sign_T * log_ratio_T, sign_T * log_ratio_T.clamp(-clip_low, clip_high))
    ratio_N = rows.mean(clipped_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return rows.spread(-rows.mean(tokens.advantages_T) * ratio_N)


def gmpo_clipped(tokens: _Tokens, *, clip_low: float = 0.4, clip_high: float = 0.4) -> Tensor:
    return _clips(1 + tokens.log_ratio_T, tokens.advantages_T, clip_low, clip_high)


def clip_cov(
    tokens: _Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, select_T: Tensor | None = None
) -> Tensor:
    """PPO-clip with the tokens of SELECT["clip_cov"] left out: arXiv 2505.22617."""
    loss_T = ppo_clip(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=None)
    return loss_T if select_T is None else torch.where(select_T, 0, loss_T)


def kl_cov(tokens: _Tokens, *, kl_coef: float = 0.1, select_T: Tensor | None = None) -> Tensor:
    """-A ratio, plus coef |l - o| on the tokens of SELECT["kl_cov"]: arXiv 2505.22617."""
    loss_T = -tokens.advantages_T * tokens.ratio_T
    gap_T = tokens.log_ratio_T
    # before the first update the gap is rounding, whose sign would be the gradient
    gap_T = torch.where(gap_T.abs() < ROUNDING, gap_T.detach(), gap_T)
    penalty_T = kl_coef * gap_T.abs()
    return loss_T if select_T is None else loss_T + clean(penalty_T, select_T)


_RULES: dict[str, Callable[..., Tensor]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "gpg": reinforce,  # its own part is the factor on the advantage
    "sapo": sapo,
    "gmpo": gmpo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "sft": sft,
}
LOSSES: dict[str, partial[Tensor]] = {name: partial(_per_token, rule) for name, rule in _RULES.items()}

# Same arguments as the loss; [T] bool, for the losses that clip.
_CLIPPED_RULES: dict[str, Callable[..., Tensor]] = {
    "ppo_clip": ppo_clipped,
    "gspo": gspo_clipped,
    "cispo": cispo_clipped,
    "gmpo": gmpo_clipped,
    "clip_cov": partial(ppo_clipped, dual_clip=None),
}
CLIPPED: dict[str, partial[Tensor]] = {name: partial(_per_token, rule) for name, rule in _CLIPPED_RULES.items()}


def clipped_value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, mask_T: Tensor, *, clip: float | None = 0.2
) -> Tensor:
    """max((V - R)^2, (V_old + clip(V - V_old) - R)^2) / 2 for each token; `clip` None: the plain square."""
    mask_T = mask_T.bool()
    values_T, old_T, returns_T = (clean(x, mask_T) for x in (values_T, old_values_T.detach(), returns_T.detach()))
    squared_T = (values_T - returns_T).square()
    if clip is None:
        return squared_T / 2
    return torch.maximum(squared_T, (old_T + (values_T - old_T).clamp(-clip, clip) - returns_T).square()) / 2


VALUE_LOSSES: dict[str, Callable[..., Tensor]] = {"clipped": clipped_value_loss}
