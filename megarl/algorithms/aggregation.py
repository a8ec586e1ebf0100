"""Reduces per-token losses to one number by a weight for each token, computed once from the whole batch.

A micro-batch's loss is `(loss_T * weights_T).sum()` with its part of the weights, so nothing is divided twice and
the sum does not depend on how the rows are split. Rows without a True position have no effect.
T = positions, N = rows. Each rule returns the weight of one token of each row, [N] fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megarl.algorithms.rows import Groups, Rows, clean


def _token_sum(rows: Rows, group_N: Tensor | None, constant: float | None) -> Tensor:
    """1."""
    return torch.ones_like(rows.num_tokens_N, dtype=torch.float64)


def _token_mean(rows: Rows, group_N: Tensor | None, constant: float | None) -> Tensor:
    """1 / tokens: DAPO, arXiv 2503.14476."""
    return _token_sum(rows, group_N, constant) / rows.num_tokens_N.sum().clamp(min=1)


def _seq_mean_token_sum(rows: Rows, group_N: Tensor | None, constant: float | None) -> Tensor:
    """1 / rows."""
    return _token_sum(rows, group_N, constant) / (rows.num_tokens_N > 0).sum().clamp(min=1)


def _seq_mean_token_mean(rows: Rows, group_N: Tensor | None, constant: float | None) -> Tensor:
    """1 / (rows x tokens of the row): GRPO, arXiv 2402.03300."""
    return _seq_mean_token_sum(rows, group_N, constant) / rows.num_tokens_N.clamp(min=1)


def _seq_mean_token_sum_norm(rows: Rows, group_N: Tensor | None, constant: float | None) -> Tensor:
    """1 / (rows x constant): Dr. GRPO, arXiv 2503.20783."""
    if not constant or constant <= 0:
        raise ValueError(
            f"seq-mean-token-sum-norm needs a positive constant, not {constant}; pass the maximum response "
            "length, the same for every micro-batch (Dr. GRPO, arXiv 2503.20783)"
        )
    return _seq_mean_token_sum(rows, group_N, constant) / constant


def _prompt_mean(rows: Rows, group_N: Tensor | None, constant: float | None) -> Tensor:
    """1 / (prompts x tokens of the prompt): ScaleRL, arXiv 2510.13786."""
    if group_N is None:
        raise ValueError("prompt-mean needs group_N [N], the group of each row")
    groups = Groups.of(group_N.to(rows.mask_T.device), rows.num_tokens_N > 0)
    num_prompts = torch.unique(groups.group_V[rows.num_tokens_N > 0]).numel()
    return 1.0 / (groups.sum(rows.num_tokens_N).clamp(min=1) * max(num_prompts, 1))


def _weights(
    rule: Callable[[Rows, Tensor | None, float | None], Tensor],
    mask_T: Tensor,
    cu_seqlens: Tensor,
    group_N: Tensor | None = None,
    *,
    constant: float | None = None,
) -> Tensor:
    """[T] fp64: the weight of each token's loss in the batch's loss; 0 on False positions."""
    rows = Rows.of(mask_T, cu_seqlens)
    return rows.spread(rule(rows, group_N, constant))


def _aggregate(
    rule: Callable[[Rows, Tensor | None, float | None], Tensor],
    loss_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    group_N: Tensor | None = None,
    *,
    constant: float | None = None,
) -> Tensor:
    """[]: the batch's loss."""
    loss_T = clean(loss_T, mask_T.bool())
    return (loss_T * _weights(rule, mask_T, cu_seqlens, group_N, constant=constant).to(loss_T.dtype)).sum()


_RULES = {
    "token-mean": _token_mean,
    "token-sum": _token_sum,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
    "prompt-mean": _prompt_mean,
}
WEIGHTS: dict[str, Callable[..., Tensor]] = {name: partial(_weights, rule) for name, rule in _RULES.items()}
AGGREGATIONS: dict[str, Callable[..., Tensor]] = {name: partial(_aggregate, rule) for name, rule in _RULES.items()}
