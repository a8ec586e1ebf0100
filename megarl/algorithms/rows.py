"""Rows and groups of a flat batch: sums over them, and the way back to tokens.

T = positions, N = rows, K = True positions, L = the most True positions of a row. What lies on a False
position is replaced by 0 before it takes part in anything, so NaN there changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Groups", "Rows", "at_least_fp32", "clean"]


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """What the arithmetic is done in."""
    return torch.promote_types(dtype, torch.float32)


def clean(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """`x_T` with exact 0 where the mask is False, half precision as fp32; the gradient there is exactly 0 too."""
    x_T = x_T.to(at_least_fp32(x_T.dtype)) if x_T.is_floating_point() else x_T
    return torch.where(mask_T, x_T, x_T.new_zeros(()))


@dataclass(frozen=True, slots=True)
class Rows:
    """Which row each position belongs to, and which positions count."""

    mask_T: Tensor  # [T] bool
    cu_seqlens: Tensor  # [N + 1]
    num_tokens_N: Tensor  # [N] int64: True positions of each row

    @classmethod
    def of(cls, mask_T: Tensor, cu_seqlens: Tensor) -> Rows:
        mask_T, cu_seqlens = mask_T.bool(), cu_seqlens.to(mask_T.device).long()
        until_T = torch.nn.functional.pad(mask_T.cumsum(0, dtype=torch.int32), (1, 0))
        return cls(mask_T, cu_seqlens, until_T[cu_seqlens].diff().long())

    @property
    def row_T(self) -> Tensor:
        """[T] int32"""
        rows_N = torch.arange(self.num_tokens_N.numel(), dtype=torch.int32, device=self.mask_T.device)
        return torch.repeat_interleave(rows_N, self.cu_seqlens.diff(), output_size=self.mask_T.numel())

    def sum(self, x_T: Tensor) -> Tensor:
        """[N]: the sum of each row of `x_T`, which is clean."""
        zeros_N = torch.zeros(self.num_tokens_N.numel(), dtype=x_T.dtype, device=x_T.device)
        return zeros_N.index_add(0, self.row_T, x_T)

    def mean(self, x_T: Tensor) -> Tensor:
        """[N]: the mean over the True positions of each row of `x_T`, which is clean; 0 for a row without any."""
        return self.sum(x_T) / self.num_tokens_N.clamp(min=1)

    def spread(self, x_N: Tensor) -> Tensor:
        """[T]: each row's value on its True positions, 0 elsewhere."""
        return clean(x_N[self.row_T], self.mask_T)


@dataclass(frozen=True, slots=True)
class Groups:
    """Statistics of values that belong to groups, each value told its own group's. fp64, two passes.

    Only `valid` values take part; the size of a group is the number of its valid values. V = values.
    """

    group_V: Tensor  # [V] int64, dense
    valid_V: Tensor  # [V] bool
    bucket_V: Tensor  # [V] int64: the group, one beyond the last of them for values that are not valid
    num_groups: int
    size_V: Tensor  # [V] fp64: valid values of each one's group

    @classmethod
    def of(cls, group_V: Tensor, valid_V: Tensor) -> Groups:
        ids, dense_V = torch.unique(group_V, return_inverse=True)
        bucket_V = torch.where(valid_V, dense_V, ids.numel())
        sizes_G = torch.bincount(bucket_V, minlength=ids.numel() + 1).double()
        return cls(dense_V, valid_V, bucket_V, ids.numel(), sizes_G[dense_V])

    def sum(self, x_V: Tensor) -> Tensor:
        """[V] fp64: the sum over the valid values of each one's group."""
        x_V = x_V.double()
        return x_V.new_zeros(self.num_groups + 1).index_add_(0, self.bucket_V, x_V)[self.group_V]

    def mean(self, x_V: Tensor) -> Tensor:
        x_V, size_V = x_V.double(), self.size_V.clamp(min=1)
        mean_V = self.sum(x_V) / size_V
        return mean_V + self.sum(x_V - mean_V) / size_V  # the second pass takes back the rounding

    def std(self, x_V: Tensor, mean_V: Tensor, *, biased: bool) -> Tensor:
        """[V], around the means of the groups; 0 for a group of one."""
        squares_V = self.sum((x_V.double() - mean_V).square())
        return (squares_V / (self.size_V - (0 if biased else 1)).clamp(min=1)).sqrt()

    def is_flat(self, x_V: Tensor, mean_V: Tensor) -> Tensor:
        """[V] bool: all valid values of the group are the same number, but for rounding."""
        off_V = (x_V.double() - mean_V).abs() > 1e-12 * mean_V.abs().clamp(min=1)
        return self.sum(off_V) == 0
