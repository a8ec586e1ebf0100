"""Reduces per-token losses to one number, with a weight for each token that is computed once from
the whole batch.

A micro-batch's loss is `(loss_T * weights_T).sum()` with its part of the weights, so nothing is
divided twice and the sum does not depend on how the rows are split. Rows without a True position
have no effect. T = positions, N = rows. Each rule returns the inverse weight of the tokens of each
row: [N], or one number for all rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algorithms.rows import Groups, Rows


def _num_rows(rows: Rows) -> Tensor:
    return (rows.num_tokens_N > 0).sum().clamp(min=1)


def _dr_grpo(rows: Rows, group_N: Tensor | None, constant: float | None) -> Tensor:
    if not constant or constant <= 0:
        raise ValueError(
            f"seq-mean-token-sum-norm needs a positive constant, not {constant}; pass the maximum "
            "response length, the same for every micro-batch (Dr. GRPO, arXiv 2503.20783)"
        )
    return _num_rows(rows) * constant


def _prompt_mean(rows: Rows, group_N: Tensor | None, constant: float | None) -> Tensor:
    if group_N is None:
        raise ValueError("prompt-mean needs group_N [N], the group of each row")
    groups = Groups.of(group_N.to(rows.mask_T.device), rows.num_tokens_N > 0)
    num_prompts = torch.unique(groups.group_V[rows.num_tokens_N > 0]).numel()
    return groups.sum(rows.num_tokens_N).clamp(min=1) * max(num_prompts, 1)


_Rule = Callable[[Rows, Tensor | None, float | None], Tensor | int]
RULES: dict[str, _Rule] = {
    "token-mean": lambda rows, *_: rows.num_tokens_N.sum().clamp(min=1),  # DAPO, arXiv 2503.14476
    "token-sum": lambda *_: 1,
    "seq-mean-token-mean": lambda rows, *_: (
        _num_rows(rows) * rows.num_tokens_N.clamp(min=1)
    ),  # arXiv 2402.03300
    "seq-mean-token-sum": lambda rows, *_: _num_rows(rows),
    "seq-mean-token-sum-norm": _dr_grpo,  # arXiv 2503.20783
    "prompt-mean": _prompt_mean,  # ScaleRL, arXiv 2510.13786
}


def token_weights(
    aggregation: str, rows: Rows, group_N: Tensor | None, constant: float | None
) -> Tensor:
    """Returns [T] fp64: each token's weight in the batch's loss; 0 on False positions."""
    ones_N = torch.ones_like(rows.num_tokens_N, dtype=torch.float64)
    return rows.spread(ones_N / RULES[aggregation](rows, group_N, constant))
