"""Computes log-probs of labels and entropy from hidden states, one tile of logits at a time.

    hidden [T, H] --@ weight[columns].T--> tile [C, V] of logits
    tiles  --> running (max, sum exp, sum exp * z, labels' z), then two all-reduces over tp
    backward   recomputes each tile, and turns it into its gradient in place

T positions, H hidden, K labels of each position (usually 1), C tokens and V vocabulary columns of a
tile, sized to fit the device's cache. Padding rows of the weight are never multiplied, so they are
not part of the softmax. z = logits / temperature. Everything is fp32: low-precision inputs are
multiplied as they are and accumulated in fp32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megarl.types import TokenOutputs

TILE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}


@dataclass(frozen=True)
class VocabShard:
    """The token ids of this tensor rank's rows of the weight; the rows after them are padding."""

    start: int
    size: int
    group: ProcessGroup

    @classmethod
    def of(cls, vocab: int, rows: int, group: ProcessGroup) -> "VocabShard":
        """Returns this rank's shard of `vocab` token ids; `rows`: its weight rows, with padding."""
        start = rows * dist.get_rank(group)
        return cls(start, max(0, min(rows, vocab - start)), group)


def token_outputs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels: Tensor,
    shard: VocabShard,
    *,
    temperature: float,
    chunk: int,
    entropy: bool,
    rounding: float = 0.0,
) -> TokenOutputs:
    """Returns log-probs of `labels` and, with `entropy`, entropy in nats.

    Both are differentiable in hidden states and weight. Labels are [T] int64, or [T, 1 + K] with K
    extra labels, which may repeat the first. Every tensor rank passes all of `hidden_TH` and gets a
    partial gradient, to be summed over ranks. `chunk` tokens are processed at once. If the weight
    has Megatron's fp32 `main_grad`, its gradient is added there and not returned. `rounding` is the
    share of the error of rounding to bf16 that is added to the logits; 1 rounds them.
    """
    has_extra = labels.ndim > 1
    labels_KT = labels.T if has_extra else labels[None]
    logprobs_KT, entropy_T = _VocabLogprobs.apply(
        hidden_TH,
        weight_VH,
        labels_KT,
        (shard, temperature, chunk, rounding),
        entropy,
    )
    extra_TK = logprobs_KT[1:].T if has_extra else None
    return TokenOutputs(logprobs_KT[0], entropy_T if entropy else None, extra_logprobs_TK=extra_TK)


@torch.no_grad()
def top_tokens(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    shard: VocabShard,
    *,
    chunk: int,
    count: int,
) -> Tensor:
    """Returns the ids [T, count] int64 of the largest logits.

    Every tensor rank passes all of `hidden_TH`, and gets the same ids.
    """
    total = len(hidden_TH)
    no_labels = torch.zeros((0, total), dtype=torch.int64, device=hidden_TH.device)
    tiles = _Tiles(hidden_TH, weight_VH, no_labels, shard, 1.0, chunk)
    best_TK = hidden_TH.new_full((total, count), -torch.inf, dtype=tiles.dtype)
    ids_TK = torch.zeros_like(best_TK, dtype=torch.int64)
    for tokens, columns, z_CV, *_ in tiles:
        z_CK, column_CK = z_CV.topk(min(count, z_CV.shape[1]))
        column_CK += shard.start + columns.start
        best_TK[tokens], ids_TK[tokens] = _largest(
            (best_TK[tokens], z_CK), (ids_TK[tokens], column_CK), count
        )
    if shard.group.size() > 1:
        _, ids_TK = _largest(
            _all_gather(best_TK, shard.group), _all_gather(ids_TK, shard.group), count
        )
    return ids_TK


def _all_gather(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return parts


def _largest(
    values: Sequence[Tensor],
    ids: Sequence[Tensor],
    count: int,
) -> tuple[Tensor, Tensor]:
    values_TK, place_TK = torch.cat([*values], 1).topk(count)
    return values_TK, torch.cat([*ids], 1).gather(1, place_TK)


class _VocabLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        labels_KT: Tensor,
        options: tuple[Any, ...],
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # no backward for an entropy that is only reported
        tiles = _Tiles(hidden_TH, weight_VH, labels_KT, *options)
        group = tiles.shard.group
        num_labels, total = labels_KT.shape
        # finite, because -inf * 0 is NaN
        max_T = hidden_TH.new_full((total,), torch.finfo(tiles.dtype).min, dtype=tiles.dtype)
        # sums of exp(z - max) and of exp(z - max) * (z - max); each label's z
        sums_nT = hidden_TH.new_zeros((2 + num_labels, total), dtype=tiles.dtype)
        for tokens, _, z_CV, row_CK, here_CK in tiles:
            sums_nT[2:, tokens] += z_CV.gather(1, row_CK).where(here_CK, 0).T
            new_max_C = torch.maximum(max_T[tokens], z_CV.amax(1))
            _lower(sums_nT[:, tokens], max_T[tokens] - new_max_C)
            max_T[tokens] = new_max_C
            z_CV.sub_(new_max_C[:, None])
            exp_CV = torch.exp(z_CV, out=tiles.buffer(1, z_CV.shape) if entropy else z_CV)
            sums_nT[0, tokens] += exp_CV.sum(1)
            if entropy:
                sums_nT[1, tokens] += exp_CV.mul_(z_CV).sum(1)
        if group.size() > 1:
            own_max_T = max_T.clone()
            dist.all_reduce(max_T, dist.ReduceOp.MAX, group=group)
            _lower(sums_nT, own_max_T - max_T)
            dist.all_reduce(sums_nT, group=group)
        logsum_T = sums_nT[0].log()
        entropy_T = logsum_T - sums_nT[1] / sums_nT[0]
        ctx.save_for_backward(hidden_TH, weight_VH, labels_KT, max_T, sums_nT[0], entropy_T)
        ctx.main_grad = getattr(weight_VH, "main_grad", None)
        ctx.must_have_grad = getattr(weight_VH, "must_have_grad", False)
        ctx.options = options  # shard, temperature, chunk, rounding
        return sums_nT[2:] - max_T - logsum_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Computes d logprob / dz = onehot - p and d entropy / dz = -p (log p + entropy).

        Tiles have these times the sum of exp(z - max), which is divided out per row. Computing p
        from max + log sum would round it at the magnitude of the logits, and a likely token would
        lose its small 1 - p.
        """
        hidden_TH, weight_VH, labels_KT, max_T, sum_T, entropy_T = ctx.saved_tensors
        grad_KT, grad_entropy_T = gradients
        tiles = _Tiles(hidden_TH, weight_VH, labels_KT, *ctx.options)
        if grad_KT is None:
            grad_KT = torch.zeros_like(max_T).expand(labels_KT.shape)
        grad_T = grad_KT.sum(0)
        # a factor that does not vary within a row is applied to the [., H] side of both products
        has_factor = len(grad_KT) == 1 and grad_entropy_T is None
        factor_T = grad_T if has_factor else torch.ones_like(grad_T)
        scale_T = factor_T / (-tiles.temperature * sum_T)
        hot_KT = sum_T[None] if has_factor else grad_KT * sum_T
        grad_hidden_TH = hidden_TH.new_zeros(hidden_TH.shape, dtype=tiles.dtype)
        grad_weight_VH = ctx.main_grad
        if grad_weight_VH is None and ctx.needs_input_grad[1]:  # False: frozen
            grad_weight_VH = weight_VH.new_zeros(weight_VH.shape, dtype=tiles.dtype)
        for tokens, columns, z_CV, row_CK, here_CK in tiles:
            z_CV.sub_(max_T[tokens, None])
            if has_factor:
                grad_CV = z_CV.exp_()
            elif grad_entropy_T is None:
                grad_CV = z_CV.exp_().mul_(grad_T[tokens, None])
            else:
                p_CV = torch.exp(z_CV, out=tiles.buffer(1, z_CV.shape))
                grad_entropy_C = grad_entropy_T[tokens]
                constant_C = grad_T[tokens] + grad_entropy_C * (entropy_T - sum_T.log())[tokens]
                grad_CV = z_CV.mul_(grad_entropy_C[:, None]).add_(constant_C[:, None]).mul_(p_CV)
            grad_CV.scatter_add_(1, row_CK, -hot_KT[:, tokens].T * here_CK)
            _add_product(grad_hidden_TH[tokens], grad_CV, weight_VH[columns])
            if grad_weight_VH is not None:
                hidden_CH = tiles.hidden(tokens)
                scaled_CH = (hidden_CH * scale_T[tokens, None]).to(hidden_CH.dtype)
                _add_product(grad_weight_VH[columns], grad_CV.T, scaled_CH)
        grad_hidden_TH = grad_hidden_TH.mul_(scale_T[:, None]).to(hidden_TH.dtype)
        if ctx.main_grad is not None:
            grad_weight_VH = torch.zeros_like(weight_VH) if ctx.must_have_grad else None
        elif grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_TH, grad_weight_VH, None, None, None


def _lower(sums_nT: Tensor, by_T: Tensor) -> None:
    """Rescales the first two sums to a maximum that is larger by `-by_T`."""
    sums_nT[1].addcmul_(by_T, sums_nT[0])
    sums_nT[:2].mul_(by_T.exp())


@dataclass
class _Tiles:
    """Iterates over this rank's logits, tile by tile.

    Yields the slices of tokens and columns, z_CV in a buffer that the next tile overwrites, each
    label's column in the tile [C, K] (0 if outside), and [C, K] True for labels in the tile.
    """

    hidden_TH: Tensor
    weight_VH: Tensor
    labels_KT: Tensor
    shard: VocabShard
    temperature: float
    chunk: int
    rounding: float = 0.0

    def __post_init__(self) -> None:
        self.dtype = torch.promote_types(self.hidden_TH.dtype, torch.float32)
        self._tokens = max(1, min(self.chunk, len(self.hidden_TH)))
        columns = TILE_BYTES[self.hidden_TH.device.type] // (self._tokens * self.dtype.itemsize)
        self._columns = max(1, min(columns, self.shard.size))
        self._buffers = {}

    def __iter__(self) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
        for tokens in _slices(len(self.hidden_TH), self._tokens):
            hidden_CH = self.hidden(tokens)
            for columns in _slices(self.shard.size, self._columns):
                z_CV = self.buffer(0, (tokens.stop - tokens.start, columns.stop - columns.start))
                weight_HV = self.weight_VH[columns].T
                _add_product(z_CV, hidden_CH, weight_HV, beta=0.0, alpha=1 / self.temperature)
                if self.rounding:
                    z_CV.lerp_(z_CV.bfloat16().to(z_CV.dtype), self.rounding)
                row_CK = self.labels_KT[:, tokens].T - (self.shard.start + columns.start)
                here_CK = (row_CK >= 0) & (row_CK < z_CV.shape[1])
                yield tokens, columns, z_CV, row_CK.where(here_CK, 0), here_CK

    def hidden(self, tokens: slice) -> Tensor:
        """Returns the hidden states [C, H] of these tokens, on a CPU in fp32.

        A CPU cannot accumulate a product of low-precision numbers in fp32.
        """
        hidden_CH = self.hidden_TH[tokens]
        return hidden_CH if hidden_CH.is_cuda else hidden_CH.to(self.dtype)

    def buffer(self, number: int, shape: Sequence[int]) -> Tensor:
        """Returns buffer 0 (the logits) or 1 (scratch space of the same size), viewed as `shape`.

        A buffer is allocated on first use.
        """
        if number not in self._buffers:
            self._buffers[number] = self.hidden_TH.new_empty(
                self._tokens * self._columns, dtype=self.dtype
            )
        return self._buffers[number][: prod(shape)].view(*shape)


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _add_product(
    into: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0
) -> None:
    """Computes into = beta x into + alpha x a @ b, accumulated in the precision of `into`."""
    options: dict[str, Any] = {"beta": beta, "alpha": alpha}
    dtype = into.dtype
    if into.is_cuda and not a.dtype == b.dtype == dtype:
        options["out_dtype"] = dtype
        dtype = a.dtype if b.dtype == dtype else b.dtype
    torch.addmm(into, a.to(dtype), b.to(dtype), out=into, **options)
