"""Hidden states -> log-prob of each label and entropy. Logits are computed tile by tile, in forward and in backward.

    hidden [T, H] --@ weight[columns].T--> tile [C, V] of logits --> running (max, sum exp, sum exp * z, label's z)
                                                                     two all-reduces over tp for all T
    backward recomputes each tile, turns it into its gradient in place, and multiplies that by weight and hidden

T positions, H hidden, C tokens and V vocabulary columns of a tile, sized to fit the device's cache. Padding rows of
the weight are never multiplied, so they are not part of the softmax. z = logits / temperature. Everything is fp32:
low-precision inputs are multiplied as they are and accumulated in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megarl.types import TokenOutputs

TILE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The token ids of this tensor rank's rows of the weight: [start, start + size); rows beyond are padding."""

    start: int
    size: int
    group: ProcessGroup

    @classmethod
    def of(cls, vocab: int, rows: int, group: ProcessGroup) -> VocabShard:
        """`vocab` is the number of token ids, `rows` the number of weight rows on this rank, including padding."""
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
    """Returns log-probs of `labels_T` and, with `entropy`, entropy in nats; differentiable in hidden and weight.

    Every tensor rank passes all of `hidden_TH` and gets a partial gradient, to be summed over ranks. `chunk` tokens are
    processed at once. If the weight has Megatron's fp32 `main_grad`, its gradient is added there and not returned.
    """
    logprobs_T, entropy_T = _VocabLogprobs.apply(hidden_TH, weight_VH, labels_T, shard, temperature, chunk, entropy)
    return TokenOutputs(logprobs_T, entropy_T if entropy else None)


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
        ctx.set_materialize_grads(False)  # no backward for an entropy that is only reported
        tiles = _Tiles(hidden_TH, weight_VH, labels_T, shard, temperature, chunk)
        total = hidden_TH.shape[0]
        lowest = torch.finfo(tiles.dtype).min  # not -inf, whose product with 0 is NaN
        max_T = hidden_TH.new_full((total,), lowest, dtype=tiles.dtype)
        sums_3T = hidden_TH.new_zeros((3, total), dtype=tiles.dtype)  # exp(z - max), exp(z - max) * (z - max), label's
        for tokens, _, z_CV, row_C, here_C in tiles:
            sums_3T[2, tokens] += z_CV.gather(1, row_C[:, None])[:, 0].where(here_C, 0)
            new_max_C = torch.maximum(max_T[tokens], z_CV.amax(1))
            _lower(sums_3T[:, tokens], max_T[tokens] - new_max_C)
            max_T[tokens] = new_max_C
            z_CV.sub_(new_max_C[:, None])
            exp_CV = torch.exp(z_CV, out=tiles.second(z_CV) if entropy else z_CV)
            sums_3T[0, tokens] += exp_CV.sum(1)
            if entropy:
                sums_3T[1, tokens] += exp_CV.mul_(z_CV).sum(1)
        if dist.get_world_size(shard.group) > 1:
            global_max_T = max_T.clone()
            dist.all_reduce(global_max_T, dist.ReduceOp.MAX, group=shard.group)
            _lower(sums_3T, max_T - global_max_T)
            dist.all_reduce(sums_3T, group=shard.group)
            max_T = global_max_T
        logsum_T = sums_3T[0].log()
        entropy_T = logsum_T - sums_3T[1] / sums_3T[0]
        ctx.save_for_backward(hidden_TH, weight_VH, labels_T, max_T, sums_3T[0], entropy_T)
        ctx.main_grad = getattr(weight_VH, "main_grad", None)
        ctx.must_have_grad = getattr(weight_VH, "must_have_grad", False)
        ctx.reading = shard, temperature, chunk
        return sums_3T[2] - max_T - logsum_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """d logprob / dz = onehot - p, d entropy / dz = -p (log p + entropy), both times the sum of exp(z - max).

        That sum is divided out per row: max + log sum would be rounded to the size of the logits, and p of a likely
        token with it, of whose 1 - p little is left.
        """
        hidden_TH, weight_VH, labels_T, max_T, sum_T, entropy_T = ctx.saved_tensors
        grad_logprobs_T, grad_entropy_T = gradients
        tiles = _Tiles(hidden_TH, weight_VH, labels_T, *ctx.reading)
        grad_T = torch.zeros_like(max_T) if grad_logprobs_T is None else grad_logprobs_T
        # a row's factor is applied to the [., H] side of both products, unless entropy makes it vary within the row
        scale_T = (grad_T if grad_entropy_T is None else torch.ones_like(grad_T)) / (-tiles.temperature * sum_T)
        hot_T = sum_T if grad_entropy_T is None else grad_T * sum_T
        grad_hidden_TH = hidden_TH.new_zeros(hidden_TH.shape, dtype=tiles.dtype)
        grad_weight_VH = ctx.main_grad
        if grad_weight_VH is None:
            grad_weight_VH = weight_VH.new_zeros(weight_VH.shape, dtype=tiles.dtype)
        for tokens, columns, z_CV, row_C, here_C in tiles:
            z_CV.sub_(max_T[tokens, None])
            if grad_entropy_T is None:
                grad_CV = z_CV.exp_()
            else:
                p_CV, grad_entropy_C = torch.exp(z_CV, out=tiles.second(z_CV)), grad_entropy_T[tokens]
                constant_C = grad_T[tokens] + grad_entropy_C * (entropy_T - sum_T.log())[tokens]
                grad_CV = z_CV.mul_(grad_entropy_C[:, None]).add_(constant_C[:, None]).mul_(p_CV)
            grad_CV.scatter_add_(1, row_C[:, None], (-hot_T[tokens] * here_C)[:, None])
            _add_product(grad_hidden_TH[tokens], grad_CV, weight_VH[columns])
            scaled_CH = (tiles.hidden(tokens) * scale_T[tokens, None]).to(
                hidden_TH.dtype if hidden_TH.is_cuda else tiles.dtype
            )
            _add_product(grad_weight_VH[columns], grad_CV.T, scaled_CH)
        grad_hidden_TH = grad_hidden_TH.mul_(scale_T[:, None]).to(hidden_TH.dtype)
        if ctx.main_grad is not None:
            nothing = torch.zeros_like(weight_VH) if ctx.must_have_grad else None
            return grad_hidden_TH, nothing, None, None, None, None, None
        return grad_hidden_TH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None, None


def _lower(sums_nT: Tensor, by_T: Tensor) -> None:
    """Rescale the first two sums to a maximum that is larger by `-by_T`."""
    sums_nT[1].addcmul_(by_T, sums_nT[0])
    sums_nT[:2].mul_(by_T.exp())


class _Tiles:
    """Iterates over all logits: (tokens, columns, z_CV in a buffer that the next tile overwrites, the label's column or
    0, whether the label is in this tile)."""

    def __init__(
        self, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, shard: VocabShard, temperature: float, chunk: int
    ) -> None:
        self.temperature = temperature
        self.dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
        self._hidden_TH, self._weight_VH, self._labels_T, self._shard = hidden_TH, weight_VH, labels_T, shard
        self._tokens = max(1, min(chunk, hidden_TH.shape[0]))
        columns = TILE_BYTES[hidden_TH.device.type] // (self._tokens * self.dtype.itemsize)
        self._columns = max(1, min(columns, shard.size))
        self._buffers_2n: list[Tensor] = []

    def __iter__(self) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
        for tokens in _slices(self._hidden_TH.shape[0], self._tokens):
            hidden_CH = self.hidden(tokens)
            for columns in _slices(self._shard.size, self._columns):
                z_CV = self._buffer(0, tokens.stop - tokens.start, columns.stop - columns.start)
                _add_product(z_CV, hidden_CH, self._weight_VH[columns].T, beta=0.0, alpha=1 / self.temperature)
                row_C = self._labels_T[tokens] - (self._shard.start + columns.start)
                here_C = (row_C >= 0) & (row_C < z_CV.shape[1])
                yield tokens, columns, z_CV, row_C.where(here_C, 0), here_C

    def hidden(self, tokens: slice) -> Tensor:
        """[C, H]; in fp32 on a CPU, which cannot accumulate a product of low-precision numbers in fp32."""
        hidden_CH = self._hidden_TH[tokens]
        return hidden_CH if hidden_CH.is_cuda else hidden_CH.to(self.dtype)

    def second(self, z_CV: Tensor) -> Tensor:
        """A second buffer of the same shape."""
        return self._buffer(1, *z_CV.shape)

    def _buffer(self, number: int, num_tokens: int, num_columns: int) -> Tensor:
        while len(self._buffers_2n) <= number:
            self._buffers_2n.append(self._hidden_TH.new_empty(self._tokens * self._columns, dtype=self.dtype))
        return self._buffers_2n[number][: num_tokens * num_columns].view(num_tokens, num_columns)


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _add_product(into: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> None:
    """into = beta x into + alpha x a @ b, accumulated in the precision of `into`."""
    if a.dtype == b.dtype == into.dtype:
        torch.addmm(into, a, b, beta=beta, alpha=alpha, out=into)
    elif into.is_cuda:
        low = b.dtype if b.dtype != into.dtype else a.dtype
        torch.addmm(into, a.to(low), b.to(low), beta=beta, alpha=alpha, out_dtype=into.dtype, out=into)
    else:
        torch.addmm(into, a.to(into.dtype), b.to(into.dtype), beta=beta, alpha=alpha, out=into)
