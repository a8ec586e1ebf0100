"""The trained positions of a flat batch as spans: stretches of one row on which an advantage without discount is
constant. Where rewards are rare a row is a few spans, so the maths is that of N rows, not of T positions, and one
pass writes the result; where every token has a reward each True position is a span of its own.

T = positions, N = rows, K = spans, in the order of the batch.
The passes over [T] are numpy's: it copies runs of a mask as blocks, and asks for huge pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.rows import at_least_fp32

__all__ = ["Spans", "lay", "pick"]

RARE = 1 / 16  # of the positions: up to here spans are found one by one


def pick(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """[K]: what lies on the True positions, half precision as fp32."""
    x_T = x_T.detach().cpu()
    x_T = x_T.to(at_least_fp32(x_T.dtype)) if x_T.is_floating_point() else x_T  # numpy has no bfloat16
    return torch.from_numpy(x_T.numpy()[mask_T.cpu().numpy()])


def lay(x_K: Tensor, mask_T: Tensor) -> Tensor:
    """[T]: back on the True positions, 0 elsewhere; on the device of the mask."""
    x_T = np.zeros(mask_T.numel(), dtype=x_K.numpy().dtype)
    x_T[mask_T.cpu().numpy()] = x_K.numpy()
    return torch.from_numpy(x_T).to(mask_T.device)


@dataclass(frozen=True, slots=True)
class Spans:
    mask_T: Tensor  # bool, on the CPU as all of this
    bounds: np.ndarray  # [N + 1] int64: row n has the spans bounds[n]:bounds[n + 1]
    num_tokens_N: Tensor  # int64: True positions of each row
    tokens_K: Tensor | None  # fp64: True positions of each span; None: one each
    pieces: tuple[np.ndarray, np.ndarray] | None  # that make up all T positions: is it a span, its end; None: as above

    @classmethod
    def of(cls, mask_T: Tensor, cu_seqlens: Tensor, *, marks: np.ndarray | None = None, every: bool = False) -> Spans:
        """The runs of True positions within a row, cut behind those where `marks` [T] bool is True; every position on
        its own where `every` says so or many are marked. What `marks` says of False positions does not matter."""
        mask, cu = mask_T.numpy(), cu_seqlens.numpy().astype(np.int64)
        bits = mask.view(np.uint8)
        edges = _merged(cu, _places(bits[1:] != bits[:-1]) + 1)[1:]
        until = np.concatenate([[0], np.cumsum(np.diff(edges, prepend=0) * mask[edges - 1])])
        tokens_before_N = until[np.searchsorted(edges, cu, side="right")]
        num_tokens_N = torch.from_numpy(np.diff(tokens_before_N))
        if every or (marks is not None and np.count_nonzero(marks) > RARE * mask.size):
            return cls(mask_T, tokens_before_N, num_tokens_N, None, None)
        marked = edges[:0] if marks is None else _places(marks)
        ends = _merged(edges, marked[mask[marked]] + 1)
        is_span = mask[ends - 1]
        bounds = np.searchsorted(ends[is_span], cu, side="right")
        tokens_K = torch.from_numpy(np.diff(ends, prepend=0)[is_span].astype(np.float64))
        return cls(mask_T, bounds, num_tokens_N, tokens_K, (is_span, ends))

    def at_ends(self, x_T: Tensor) -> Tensor:
        """[K]: what lies on the last position of each span."""
        if self.pieces is None:
            return pick(x_T, self.mask_T)
        is_span, ends = self.pieces
        return x_T[torch.from_numpy(ends[is_span] - 1)]

    def sum_within(self, x_T: Tensor) -> Tensor:
        """[K]: the sum over the positions of each span, added in pairs."""
        if self.pieces is None or not self.mask_T.numel():
            return self.at_ends(x_T)
        is_span, ends = self.pieces
        with np.errstate(all="ignore"):  # whatever lies on False positions
            return torch.from_numpy(np.add.reduceat(x_T.numpy(), np.append(0, ends[:-1]))[is_span])

    def spread(self, x_N: Tensor) -> Tensor:
        """[K]: each row's value on each of its spans."""
        return torch.from_numpy(np.repeat(x_N.numpy(), np.diff(self.bounds)))

    def sum(self, x_K: Tensor) -> Tensor:
        """[N] fp64: the sum over the spans of each row."""
        sums_N = np.zeros(len(self.bounds) - 1)
        filled = self.bounds[1:] > self.bounds[:-1]
        if filled.any():
            sums_N[filled] = np.add.reduceat(x_K.numpy(), self.bounds[:-1][filled], dtype=np.float64)
        return torch.from_numpy(sums_N)

    def sums_fit(self, x_K: Tensor, limit: float) -> Tensor:
        """[N] bool: no sum over part of the row is beyond `limit`, or not a number."""
        if x_K.numel():
            low, high = (bound.item() for bound in x_K.aminmax())
            longest = int(np.diff(self.bounds).max())
            if max(-low, high) * longest <= limit and low == low:  # as always but for hostile numbers
                return torch.ones(len(self.bounds) - 1, dtype=torch.bool)
        return self.sum(x_K.double().abs()) <= limit

    def lay(self, x_K: Tensor) -> Tensor:
        """[T]: each span's value on its positions, 0 elsewhere."""
        if self.pieces is None:
            return lay(x_K, self.mask_T)
        is_span, ends = self.pieces
        x = np.zeros(ends.size, dtype=x_K.numpy().dtype)
        x[is_span] = x_K.numpy()
        return torch.from_numpy(np.repeat(x, np.diff(ends, prepend=0)))


def _merged(*sorted_x: np.ndarray) -> np.ndarray:
    """All numbers of the sorted arrays, each once, in order."""
    x = np.sort(np.concatenate(sorted_x), kind="stable")  # which merges runs
    return x[np.append(True, x[1:] != x[:-1])] if x.size else x


def _places(flags: np.ndarray) -> np.ndarray:
    """[int64]: where `flags` is True. Eight of them are looked at as one number first, and those eights likewise: where
    True is rare, that takes a fifth of the time of `flatnonzero`."""
    whole = flags.size // 8 * 8
    if whole < 1 << 12:
        return np.flatnonzero(flags)
    eights = _places(flags[:whole].view(np.uint64) != 0)
    if eights.size > RARE * whole / 8:
        return np.flatnonzero(flags)
    found = np.flatnonzero(flags[:whole].reshape(-1, 8)[eights])  # of eights x 8
    return np.append(eights[found // 8] * 8 + found % 8, np.flatnonzero(flags[whole:]) + whole)
