"""Losses, selections, corrections and aggregations as tests compare them: of plain tensors, and summed over a batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms import aggregation, corrections, losses
from megarl.algorithms.losses import Tokens
from megarl.algorithms.rows import Rows, clean


def _loss_and_clip(name: str, *inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """[T], the loss of each token, and [T] bool: it is clipped."""
    return losses.loss_and_clip(name, Tokens.of(*inputs), **options)


def _loss(name: str, *inputs: Tensor, **options: Any) -> Tensor:
    return _loss_and_clip(name, *inputs, **options)[0]


def _select(name: str, *inputs: Tensor, **options: Any) -> Tensor:
    """[T] bool; selections do not read the rows."""
    return losses.SELECT[name](Tokens.of(*inputs, torch.zeros(0)), **options)


def _correct(
    name: str,
    old_T: Tensor,
    rollout_T: Tensor,
    *rows: Tensor,
    logprobs_T: Tensor | None = None,
    advantages_T: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """[T]; only some corrections read `logprobs_T` and `advantages_T`."""
    new_T = old_T if logprobs_T is None else logprobs_T
    weights_T = torch.zeros_like(old_T) if advantages_T is None else advantages_T
    tokens = Tokens.of(new_T, old_T, weights_T, *rows)
    return corrections.correction_weights(name, tokens, rollout_T, **options)


def _weights(
    name: str,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    group_N: Tensor | None = None,
    *,
    constant: float | None = None,
) -> Tensor:
    return aggregation.token_weights(name, Rows.of(mask_T, cu_seqlens), group_N, constant)


def _aggregate(name: str, loss_T: Tensor, mask_T: Tensor, *rows: Tensor, **options: Any) -> Tensor:
    """[], the loss of a batch."""
    loss_T = clean(loss_T, mask_T.bool())
    return (loss_T * _weights(name, mask_T, *rows, **options).to(loss_T.dtype)).sum()


LOSS_AND_CLIP = {name: partial(_loss_and_clip, name) for name in losses.RULES}
LOSSES = {name: partial(_loss, name) for name in losses.RULES}
SELECT = {name: partial(_select, name) for name in losses.SELECT}
CORRECTIONS = {name: partial(_correct, name) for name in corrections.RULES}
WEIGHTS = {name: partial(_weights, name) for name in aggregation.RULES}
AGGREGATIONS = {name: partial(_aggregate, name) for name in aggregation.RULES}
