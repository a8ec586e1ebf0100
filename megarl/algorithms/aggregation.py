"""From per-token losses to one number: a weight for each token, computed once from the whole batch.

A micro-batch's loss is ``(loss_T * weights_T).sum()`` with its part of the weights, so nothing is divided
twice and no split of the rows changes the sum. Rows without a True position count nowhere.
S = rows that have a token, P = groups that have one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megarl.algorithms.rows import Groups, Rows, clean

__all__ = ["AGGREGATIONS", "WEIGHTS"]


def _token_mean(rows: Rows, group_N: Tensor | None, constant: float | None) -> Tensor:
    return _token_sum(rows, group_N, constant) / rows.num_tokens_N.sum().clamp(min=1)


def _token_sum(rows: Rows, group_N: Tensor | None, constant: float | None) -> Tensor:
    return torch.ones((), dtype=torch.float64, device=rows.mask_T.device)


def _seq_mean_token_mean(rows: Rows, group_N: Tensor | None, constant: float | None) -> Tensor:
    return _seq_mean_token_sum(rows, group_N, constant) / rows.num_tokens_N.clamp(min=1)


def _seq_mean_token_sum(rows: Rows, group_N: Tensor | None, constant: float | None) -> Tensor:
    return _token_sum(rows, group_N, constant) / (rows.num_tokens_N > 0).sum().clamp(min=1)


def _seq_mean_token_sum_norm(rows: Rows, group_N: Tensor | None, constant: float | None) -> Tensor:
    if not constant or constant <= 0:
        raise ValueError(
            f"seq-mean-token-sum-norm needs a positive constant, not {constant}; give the response budget, "
            "the same in every micro-batch (Dr. GRPO, arXiv 2503.20783)"
        )
    return _seq_mean_token_sum(rows, group_N, constant) / constant


def _prompt_mean(rows: Rows, group_N: Tensor | None, constant: float | None) -> Tensor:
    if group_N is None:
        raise ValueError("prompt-mean needs group_N [N], the group of each row")
    group_N = group_N.to(rows.mask_T.device)
    groups = Groups.of(group_N, rows.num_tokens_N > 0)
    num_prompts = torch.unique(group_N[rows.num_tokens_N > 0]).numel()
    return 1.0 / (groups.sum(rows.num_tokens_N.double()).clamp(min=1) * max(num_prompts, 1))


def _weights(
    rule: Callable[[Rows, Tensor | None, float | None], Tensor],
    mask_T: Tensor,
    cu_seqlens: Tensor,
    group_N: Tensor | None = None,
    *,
    constant: float | None = None,
) -> Tensor:
    """[T] fp64: what one token's loss weighs in the batch's loss; 0 on False positions."""
    rows = Rows.of(mask_T, cu_seqlens)
    weight_N = rule(rows, group_N, constant)
    return rows.spread(weight_N) if weight_N.ndim else clean(weight_N, rows.mask_T)


def _aggregate(
    rule: Callable[[Rows, Tensor | None, float | None], Tensor],
    loss_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    group_N: Tensor | None = None,
    *,
    constant: float | None = None,
) -> Tensor:
    rows = Rows.of(mask_T, cu_seqlens)
    loss_T, weight_N = clean(loss_T, rows.mask_T), rule(rows, group_N, constant)
    if not weight_N.ndim:  # of every row the same
        return loss_T.sum() * weight_N.to(loss_T.dtype)
    return (loss_T * rows.spread(weight_N).to(loss_T.dtype)).sum()


_OF_ROWS = {  # what a token of each row weighs: [N] fp64, or [] where that is the same in every row
    "token-mean": _token_mean,
    "token-sum": _token_sum,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
    "prompt-mean": _prompt_mean,
}
WEIGHTS: dict[str, Callable[..., Tensor]] = {name: partial(_weights, rule) for name, rule in _OF_ROWS.items()}
AGGREGATIONS: dict[str, Callable[..., Tensor]] = {name: partial(_aggregate, rule) for name, rule in _OF_ROWS.items()}
