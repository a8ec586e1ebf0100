"""KL divergences.

Estimators of KL(policy || reference) from sampled tokens, with delta = log pi - log ref:

| name | value              | gradient to log pi | expected gradient            |
| k1   | delta              | 1                  | 0: useless as a loss         |
| k2   | delta^2 / 2        | delta              | of KL(policy || ref)         |
| k3   | e^-delta - 1 + delta | 1 - e^-delta     | of KL(ref || policy)         |
| k3+  | same as k3         | delta              | of KL(policy || ref)         |

Schulman, "Approximating KL Divergence", 2020. T = positions. There is no mask: the caller cleans
both inputs. `teacher_divergence` needs no sampling: it sums over R = K + 1 outcomes of each
position, which are K tokens and one outcome for all other tokens.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megarl.algorithms.rows import Formula, Rows, at_least_fp32, clean
from megarl.config.schema import KlTerm
from megarl.types import TrainBatch

LOG_RATIO_LIMIT = 20.0  # e^20 still fits fp32 with room for sums
REST_FLOOR = 1e-6  # lower bound of the probability of all other tokens: fp32 rounds 1 - sum
LOG_ZERO = -1e4  # in place of log 0: its exponential is 0, and its differences are finite


def likelihood_ratio(log_ratio: Tensor) -> Tensor:
    """Returns e^log_ratio, clamped to e^+-LOG_RATIO_LIMIT; clamped elements have no gradient."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _estimate(
    value: Callable[[Tensor], Tensor],
    logprobs_T: Tensor,
    ref_logprobs_T: Tensor,
    *,
    value_clamp: float | None = None,
) -> Tensor:
    """Returns `value` of delta, clamped to +-`value_clamp`.

    The clamp removes the gradient exactly where the policy is furthest from the reference.
    """
    dtype = at_least_fp32(logprobs_T.dtype)
    value_T = value(logprobs_T.to(dtype) - ref_logprobs_T.to(dtype))
    return value_T if value_clamp is None else value_T.clamp(-value_clamp, value_clamp)


def _k3_plus(
    logprobs_T: Tensor, ref_logprobs_T: Tensor, *, value_clamp: float | None = None
) -> Tensor:
    """Returns k3's value with k2's gradient; the clamp bounds the value but not the gradient."""
    value_T = KL["k3"](logprobs_T, ref_logprobs_T, value_clamp=value_clamp)
    k2_T = KL["k2"](logprobs_T, ref_logprobs_T)
    return value_T.detach() + (k2_T - k2_T.detach())


KL: dict[str, Formula] = {
    "k1": partial(_estimate, lambda delta_T: delta_T),
    "k2": partial(_estimate, lambda delta_T: delta_T.square() / 2),
    "k3": partial(
        _estimate,
        lambda delta_T: (-delta_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).expm1() + delta_T,
    ),
    "k3+": _k3_plus,
    "abs": partial(_estimate, torch.abs),
}


def adapted(coef: float, mean: float, term: KlTerm, batch: TrainBatch) -> float:
    """Returns the coefficient of the KL term after a batch with mean KL `mean`.

    It grows if `mean` > `term.target` and shrinks if `mean` < `term.target`, by at most a fifth
    over `term.horizon` trained rows. Without a target, or for a mean that is not finite, it stays.
    Ziegler et al. 2019, arXiv 1909.08593, section 2.2.
    """
    if term.target is None or not math.isfinite(mean):
        return coef
    num_rows = int((Rows.of(batch.mask, batch.cu_seqlens).num_tokens_N > 0).sum())
    change = min(max(mean / term.target - 1, -0.2), 0.2)
    return coef * (1 + change * num_rows / term.horizon)


def teacher_divergence(
    student_TK: Tensor, teacher_TK: Tensor, mask_T: Tensor, *, beta: float = 1.0
) -> Tensor:
    """Returns [T] in nats: the divergence of the student's next-token distribution from the
    teacher's; 0 where `mask_T` is False.

    Both inputs are log-probs, under the whole vocabulary, of the same K distinct tokens; -inf of
    the teacher marks padding. All other tokens are one more outcome; without it, the student could
    lower its loss by moving probability to them. Merging outcomes never increases a divergence, so
    this is a lower bound, and exact if K is the vocabulary size.

    beta = 1: KL(student || teacher), 0: KL(teacher || student), between: the generalised
    Jensen-Shannon divergence of GKD (arXiv 2306.13649, section 2), beta KL(teacher || mix) + (1 -
    beta) KL(student || mix) with mix = beta teacher + (1 - beta) student.
    """
    is_token_TK = mask_T[:, None] & (teacher_TK != -torch.inf)
    student_TR, teacher_TR = (_with_rest(x_TK, is_token_TK) for x_TK in (student_TK, teacher_TK))
    if beta in (0, 1):
        return _exact_kl(student_TR, teacher_TR) if beta else _exact_kl(teacher_TR, student_TR)
    mix_TR = torch.logaddexp(teacher_TR + math.log(beta), student_TR + math.log(1 - beta))
    return clean(
        beta * _exact_kl(teacher_TR, mix_TR) + (1 - beta) * _exact_kl(student_TR, mix_TR), mask_T
    )


def _with_rest(logprobs_TK: Tensor, is_token_TK: Tensor) -> Tensor:
    """Returns [T, K + 1]: the log-probs of the tokens, then that of all other tokens together."""
    logprobs_TK = logprobs_TK.to(at_least_fp32(logprobs_TK.dtype)).where(is_token_TK, LOG_ZERO)
    rest_T1 = (1 - logprobs_TK.exp().sum(1, keepdim=True)).clamp(min=REST_FLOOR)
    return torch.cat([logprobs_TK, rest_T1.log()], 1)


def _exact_kl(p_TR: Tensor, q_TR: Tensor) -> Tensor:
    return (p_TR.exp() * (p_TR - q_TR)).sum(1)
