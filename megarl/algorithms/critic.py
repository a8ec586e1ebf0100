"""A critic's loss, targets at a cut, and metrics; GAE itself is in advantages.py, the clipped loss
in losses.py.

T = tokens of the batch, M = tokens of one micro-batch, N = rows. V_t is the value of the state
before the label at t.
"""

import torch
from torch import Tensor

from megarl.algorithms.losses import clipped_value_loss
from megarl.algorithms.rows import clean
from megarl.algorithms.whitening import whiten_stats
from megarl.types import FINISH, MicrobatchRows, ScoredBatch, TokenLosses, TokenOutputs, TrainBatch


def value_after_cut(batch: TrainBatch, values_T: Tensor) -> Tensor:
    """Returns [T]: the value after the cut, at the last trained position of rows cut by length.

    This is the value at the row's last position; other positions get 0. Times gamma and added to
    the reward, it acts as GAE's V after the last token.
    """
    after_T = torch.zeros_like(values_T)
    is_cut_N = (batch.finish == FINISH.index("length")) & (batch.lengths_N > 1)
    # the last position is not trained; the one before it is, with the last token as label
    end_N = batch.cu_seqlens[1:][is_cut_N] - 1
    after_T[end_N - 1] = values_T[end_N]
    return clean(after_T, batch.mask)


def value_losses(
    batch: ScoredBatch, clip: float | None, outputs: TokenOutputs, rows: MicrobatchRows
) -> TokenLosses:
    """Computes each token's clipped squared error to the returns; a types.Loss, once its first two
    arguments are bound.
    """
    assert (
        outputs.values_T is not None and batch.old_values is not None and batch.returns is not None
    )
    old_M = rows.select(batch.old_values)
    loss_M = clipped_value_loss(
        outputs.values_T, old_M, rows.select(batch.returns), rows.mask, clip=clip
    )
    moved_M = clean((outputs.values_T.detach() - old_M).abs(), rows.mask)
    clipped = (moved_M > clip).sum() if clip is not None else rows.mask.sum() * 0
    return TokenLosses(loss_M, {"value/clip_frac": clipped}, rows.mask.sum())


def value_metrics(batch: ScoredBatch) -> dict[str, float]:
    """Returns the means of old values V and of their targets R, and the explained variance.

    All are over trained tokens. The explained variance is 1 - Var(R - V) / Var(R): 1 for an exact
    critic, 0 for a constant one; it is left out if all targets are equal.
    """
    assert batch.old_values is not None and batch.returns is not None
    values, targets = (whiten_stats(x_T, batch.mask) for x_T in (batch.old_values, batch.returns))
    metrics = {"value/mean": values.mean, "returns/mean": targets.mean}
    if variance := targets.variance():
        error = whiten_stats(batch.returns - batch.old_values, batch.mask)
        metrics["value/explained_variance"] = 1 - error.variance() / variance
    return metrics
