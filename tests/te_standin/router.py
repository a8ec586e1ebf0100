"""Stand-ins for the fused router, whose gradient follows from the logits and the chosen experts.

Shapes: N tokens, E experts.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

from te_standin.compiled import COMPILED, stands_in

COMPILED.NVTERoutingMapFormat = enum.IntEnum(
    "NVTERoutingMapFormat", ["BYTEMAP", "BITMAP_U8"], start=0
)
COMPILED.NVTEQBHistogramMode = enum.IntEnum(
    "NVTEQBHistogramMode", ["TWO_KERNEL", "FUSED_ATOMIC"], start=0
)


def _probs(
    logits_NE: Tensor, map_NE: Tensor, topk: int, pre: bool, scale: Any, score: str
) -> Tensor:
    """Returns the weights of the chosen experts, 0 for others."""
    if score == "softmax":
        hidden = torch.zeros_like(map_NE) if pre else ~map_NE
        probs_NE = logits_NE.masked_fill(hidden, -torch.inf).softmax(1) * map_NE
    else:
        assert score == "sigmoid"
        probs_NE = logits_NE.sigmoid() * map_NE
        if topk > 1:
            probs_NE = probs_NE / (probs_NE.sum(1, keepdim=True) + 1e-20)
    return probs_NE * (scale or 1.0)


@stands_in
def fused_topk_with_score_function_fwd(
    logits, topk, pre, groups, group_topk, scale, score, bias, kind, indices
):
    assert indices is None and kind == COMPILED.NVTERoutingMapFormat.BYTEMAP
    wide_NE = logits.detach().float()
    scores_NE = wide_NE if score == "softmax" else wide_NE.sigmoid()
    if bias is not None:
        scores_NE = scores_NE + bias
    if group_topk:
        by_group = scores_NE.unflatten(1, (groups, -1))
        of_group = by_group.topk(topk // group_topk, 2).values.sum(2)
        is_open = (
            torch.zeros_like(of_group).scatter(1, of_group.topk(group_topk, 1).indices, 1).bool()
        )
        scores_NE = by_group.masked_fill(~is_open[..., None], -torch.inf).flatten(1)
    map_NE = torch.zeros_like(scores_NE).scatter(1, scores_NE.topk(topk, 1).indices, 1).bool()
    return _probs(wide_NE, map_NE, topk, pre, scale, score).to(logits.dtype), map_NE, wide_NE


@stands_in
def fused_topk_with_score_function_bwd(
    map_NE, wide_NE, grad, grad_logits, topk, pre, scale, score, dense, kind
):
    assert not dense
    with torch.enable_grad():
        leaf_NE = wide_NE.detach().requires_grad_()
        probs_NE = _probs(leaf_NE, map_NE, topk, pre, scale, score)
    grad_logits.copy_(torch.autograd.grad(probs_NE, leaf_NE, grad.float())[0])
