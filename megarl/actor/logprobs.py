"""Hidden states -> log-probability of each label and entropy, with logits made and dropped chunk by chunk.

    hidden [T, H] --@ weight[:V_real].T--> logits of C tokens --> running (max, sum exp, label's, sum exp * z)
                                                                      two all-reduces over tp for all T
    backward makes the logits of a chunk again.

T positions, H hidden, C tokens of a chunk, V rows of the vocabulary that this tensor rank holds and that
stand for a token: padding rows are never multiplied, so they are out of the softmax. z = logits / temperature.
All that follows the matrix product is fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["TokenOutputs", "VocabShard", "token_outputs"]


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    logprobs_T: Tensor  # fp32, of the label
    entropy_T: Tensor | None  # fp32


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Which token ids this tensor rank's rows stand for: [start, start + size); further rows are padding."""

    start: int
    size: int
    group: ProcessGroup

    @classmethod
    def of(cls, vocab: int, rows: int, group: ProcessGroup) -> VocabShard:
        """`rows` of the weight are held here, `vocab` tokens exist."""
        start = rows * dist.get_rank(group)
        return cls(start, max(0, min(rows, vocab - start)), group)


def token_outputs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    shard: VocabShard,
    *,
    temperature: float,
    chunk: int,
    entropy: bool,
) -> TokenOutputs:
    """Log-prob of `labels_T` and, if asked, entropy; both differentiable in hidden and weight.

    `hidden_TH` is whole on every tensor rank; its gradient is this rank's part, to be summed over them.
    """
    logprobs_T, entropy_T = _VocabLogprobs.apply(hidden_TH, weight_VH, labels_T, shard, temperature, chunk, entropy)
    return TokenOutputs(logprobs_T, entropy_T if entropy else None)


def _chunks(total: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, total)) for start in range(0, total, chunk))


def _local_label(labels_C: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Row of the label in this shard (0 where it is elsewhere), and whether it is here."""
    local_C = labels_C - shard.start
    here_C = (local_C >= 0) & (local_C < shard.size)
    return torch.where(here_C, local_C, 0), here_C


class _VocabLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        labels_T: Tensor,
        shard: VocabShard,
        temperature: float,
        chunk: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        real_VH = weight_VH[: shard.size]
        total = hidden_TH.shape[0]
        max_T = hidden_TH.new_full((total,), -torch.inf, dtype=torch.float32)
        sums_3T = hidden_TH.new_zeros((3, total), dtype=torch.float32)  # of exp(z - max), exp(z - max) * z, label's z
        for at in _chunks(total, chunk) if shard.size else ():
            z_CV = (hidden_TH[at] @ real_VH.T).float().div_(temperature)
            row_C, here_C = _local_label(labels_T[at], shard)
            sums_3T[2, at] = z_CV.gather(1, row_C[:, None])[:, 0].where(here_C, 0)
            max_T[at] = z_CV.amax(1)
            exp_CV = (z_CV - max_T[at, None]).exp_()
            sums_3T[0, at] = exp_CV.sum(1)
            if entropy:
                sums_3T[1, at] = exp_CV.mul_(z_CV).sum(1)
        if dist.get_world_size(shard.group) > 1:
            global_max_T = max_T.clone()
            dist.all_reduce(global_max_T, dist.ReduceOp.MAX, group=shard.group)
            sums_3T[:2] *= (max_T - global_max_T).exp()
            dist.all_reduce(sums_3T, group=shard.group)
            max_T = global_max_T
        logsumexp_T = sums_3T[0].log() + max_T
        mean_T = sums_3T[1] / sums_3T[0]  # of z under the policy
        ctx.save_for_backward(hidden_TH, weight_VH, labels_T, logsumexp_T, mean_T)
        ctx.shard, ctx.temperature, ctx.chunk, ctx.entropy = shard, temperature, chunk, entropy
        return sums_3T[2] - logsumexp_T, logsumexp_T - mean_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """d logprob / dz = onehot - p, d entropy / dz = -p (z - mean z)."""
        grad_logprobs_T, grad_entropy_T = gradients
        hidden_TH, weight_VH, labels_T, logsumexp_T, mean_T = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        real_VH = weight_VH[: shard.size]
        grad_hidden_TH = torch.zeros_like(hidden_TH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        for at in _chunks(hidden_TH.shape[0], ctx.chunk) if shard.size else ():
            z_CV = (hidden_TH[at] @ real_VH.T).float().div_(ctx.temperature)
            p_CV = (z_CV - logsumexp_T[at, None]).exp_()
            row_C, here_C = _local_label(labels_T[at], shard)
            grad_CV = p_CV * -grad_logprobs_T[at, None]
            grad_CV.scatter_add_(1, row_C[:, None], (grad_logprobs_T[at] * here_C)[:, None])
            if ctx.entropy:
                grad_CV -= p_CV.mul_(z_CV.sub_(mean_T[at, None])).mul_(grad_entropy_T[at, None])
            grad_CV = grad_CV.div_(ctx.temperature).to(hidden_TH.dtype)
            grad_hidden_TH[at] = grad_CV @ real_VH
            grad_weight_VH[: shard.size] += grad_CV.T @ hidden_TH[at]
        return grad_hidden_TH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None, None
