"""Scores and losses of reward models: Bradley-Terry over ranked responses, cross-entropy over right
and wrong steps.

N = rows, T = positions, P = pairs of rows; R, M, Q = the same of a micro-batch. As in every
batch, a mask is True at position t where the token at t + 1 belongs to the response.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from megarl.algorithms.preference import (
    bradley_terry,
    local_pairs,
    pair_losses,
    ranked_right,
)
from megarl.algorithms.rows import Rows, clean
from megarl.types import MicrobatchRows, PreferenceBatch, StepBatch, TokenLosses, TokenOutputs

Scores = Callable[[TokenOutputs, MicrobatchRows], Tensor]  # -> score of each row, [R]


def response_positions(mask_T: Tensor) -> Tensor:
    """Returns [T] bool: the positions of the response's own tokens, including the row's last one.

    The hidden state at such a position has seen its token.
    """
    return mask_T.roll(1)  # the last position of a row is False


def row_scores(outputs: TokenOutputs, mask_T: Tensor, cu_seqlens: Tensor, aggregate: str) -> Tensor:
    """Returns [N]: one score per row; 0 for a row without a response, except with "last".

    No row may be empty. `aggregate` is one of:

    last: the score `values_T` of the row's last token. sum, mean, max, min: over the response's
    tokens. weighted: their mean, weighted by the softmax of `gates_T` over the response's tokens.
    """
    assert outputs.values_T is not None
    if aggregate == "last":
        return outputs.values_T[cu_seqlens[1:] - 1]
    rows = Rows.of(response_positions(mask_T), cu_seqlens)

    row_T = torch.arange(cu_seqlens.numel() - 1, device=mask_T.device).repeat_interleave(
        rows.cu_seqlens.diff(), output_size=mask_T.numel()
    )

    def extreme(x_T: Tensor, kind: str) -> Tensor:
        """Returns [N]; unlike segment_reduce, it divides the gradient evenly among ties."""
        least = torch.inf if kind == "min" else -torch.inf
        masked_T = torch.where(rows.mask_T, x_T, least)
        extreme_N = x_T.new_full(rows.num_tokens_N.shape, least)
        extreme_N = extreme_N.scatter_reduce(0, row_T, masked_T, f"a{kind}")
        return clean(extreme_N, rows.num_tokens_N > 0)

    if aggregate in ("max", "min"):
        return extreme(outputs.values_T, aggregate)
    if aggregate != "weighted":
        return {"sum": rows.sum, "mean": rows.mean}[aggregate](outputs.values_T)
    assert outputs.gates_T is not None
    largest_T = rows.spread(extreme(outputs.gates_T.detach(), "max"))
    shares_T = clean(outputs.gates_T - largest_T, rows.mask_T).exp()
    return rows.sum(shares_T * outputs.values_T) / rows.sum(shares_T).clamp(min=1)


def ranking_losses(
    batch: PreferenceBatch,
    scores: Scores,
    centre: float,
    outputs: TokenOutputs,
    rows: MicrobatchRows,
) -> TokenLosses:
    """Computes the Bradley-Terry loss of pairs; a types.Loss, once three arguments are bound.

    Sums are over pairs.

    All pairs of a prompt share a micro-batch, which computes each response once (arXiv 2203.02155,
    section 3.5).
    """
    pairs, margins = local_pairs(batch, rows)
    scores_R = scores(outputs, rows)
    scores_Q2 = scores_R.detach()[pairs]
    values = {"accuracy": ranked_right(scores_R.detach(), pairs), "score/mean": scores_Q2.mean(1)}
    values["score/difference"] = scores_Q2[:, 0] - scores_Q2[:, 1]
    return pair_losses(bradley_terry(scores_R, pairs, margins, centre=centre), values, pairs, rows)


def step_losses(batch: StepBatch, outputs: TokenOutputs, rows: MicrobatchRows) -> TokenLosses:
    """Computes the cross-entropy of "this step is right"; a types.Loss, once `batch` is bound.

    The log-odds are the step's score, at the step's last token (Lightman et al., arXiv 2305.20050,
    section 2.6). Sums are over steps.
    """
    assert outputs.values_T is not None
    is_right_M = rows.select(batch.is_right)
    logits_M = clean(outputs.values_T, rows.mask)
    loss_M = binary_cross_entropy_with_logits(
        logits_M, is_right_M.to(logits_M.dtype), reduction="none"
    )
    hits_M = rows.mask & ((logits_M > 0) == is_right_M)
    return TokenLosses(clean(loss_M, rows.mask), {"accuracy": hits_M.sum()}, rows.mask.sum())
