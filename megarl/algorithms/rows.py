"""Sums over the rows and the groups of a flat batch. Row n is x_T[cu_seqlens[n]:cu_seqlens[n + 1]].

T = positions, N = rows, R = runs, V = values that belong to groups, G = groups. `clean` replaces
masked values by 0 before any arithmetic, so a NaN at a masked position changes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Formula = Callable[..., Tensor]  # an entry of a table of estimators, losses or corrections


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to compute in: fp32 for half precision, otherwise `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def clean(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """Returns `x_T` with exact zeros, whose gradient is exactly 0 too, where `mask_T` is False.

    Half precision becomes fp32.
    """
    x_T = x_T.to(at_least_fp32(x_T.dtype)) if x_T.is_floating_point() else x_T
    return torch.where(mask_T, x_T, x_T.new_zeros(()))


@dataclass(frozen=True)
class Rows:
    """The rows of a flat batch and their True positions.

    A run is a maximal stretch of one row with equal mask. Only True runs are summed, so the values
    at False positions do not matter.
    """

    mask_T: Tensor  # [T] bool
    cu_seqlens: Tensor  # [N + 1] int64
    num_tokens_N: Tensor  # [N] int64: True positions of each row
    cu_runlens: Tensor  # [R + 1] int64: positions where runs begin, and T
    run_mask_R: Tensor  # [R] bool
    first_run_N: Tensor  # [N + 1] int64: the first run of each row, and R

    @classmethod
    def of(cls, mask_T: Tensor, cu_seqlens: Tensor) -> "Rows":
        """Splits N packed rows into R runs of equal mask, over whose lengths segments are reduced.

        `first_run_N` [N + 1] also holds R, the end.
        """
        mask_T = mask_T.bool()
        cu_seqlens = cu_seqlens.to(mask_T.device).long()
        changes = (mask_T[1:] != mask_T[:-1]).nonzero().flatten() + 1
        cu_runlens = torch.unique(torch.cat([cu_seqlens, changes]))
        run_mask_R = mask_T[cu_runlens[:-1]]
        first_run_N = torch.searchsorted(cu_runlens, cu_seqlens)
        lengths_R = (cu_runlens.diff() * run_mask_R).double()
        num_tokens_N = torch.segment_reduce(lengths_R, "sum", offsets=first_run_N).long()
        return cls(mask_T, cu_seqlens, num_tokens_N, cu_runlens, run_mask_R, first_run_N)

    def sum(self, x_T: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Returns [N]: the sum over the True positions of each row.

        It is computed in `dtype` (default: that of `x_T`, at least fp32).
        """
        x_T = x_T.to(at_least_fp32(x_T.dtype))
        sums_R = clean(_sums(x_T, self.cu_runlens, dtype or x_T.dtype), self.run_mask_R)
        return torch.segment_reduce(sums_R, "sum", offsets=self.first_run_N)

    def mean(self, x_T: Tensor) -> Tensor:
        """Returns [N]: the mean over the True positions of each row; 0 for a row without any."""
        return self.sum(x_T) / self.num_tokens_N.clamp(min=1)

    def spread(self, x_N: Tensor) -> Tensor:
        """Returns [T]: each row's value on its True positions, 0 elsewhere."""
        x_R = x_N.repeat_interleave(self.first_run_N.diff(), output_size=self.run_mask_R.numel())
        x_R = clean(x_R, self.run_mask_R)
        return x_R.repeat_interleave(self.cu_runlens.diff(), output_size=self.mask_T.numel())

    def sum_to_end(self, x_T: Tensor, *, decay: float = 1.0) -> Tensor:
        """Returns [T] fp64: y_t = x_t + decay y_(next t); 0 on False positions.

        next t is the row's next True position after t.
        """
        y_K = x_T[self.mask_T].double()
        for y_L in y_K.split(self.num_tokens_N.tolist()):
            if decay == 1.0:
                y_L.copy_(y_L.flip(0).cumsum(0).flip(0))
                continue
            reach = 1  # number of positions that a sum covers
            while reach < len(y_L) and decay**reach:
                y_L[:-reach] += decay**reach * y_L[reach:]
                reach *= 2
        return self._scatter(y_K)

    def first(self, x_T: Tensor) -> Tensor:
        """Returns [N]: the value at each row's first True position; 0 for a row without any."""
        first_N = self.num_tokens_N.cumsum(0) - self.num_tokens_N
        return torch.cat([x_T[self.mask_T], x_T.new_zeros(1)])[first_N] * (self.num_tokens_N > 0)

    def next(self, x_T: Tensor) -> Tensor:
        """Returns [T]: the value at the row's next True position; 0 on the last one and on False
        positions.
        """
        next_K = x_T[self.mask_T].roll(-1)
        ends_N = self.num_tokens_N.cumsum(0)[self.num_tokens_N > 0]
        return self._scatter(next_K.index_fill(0, ends_N - 1, 0))

    def _scatter(self, x_K: Tensor) -> Tensor:
        """Returns [T]: `x_K` on the True positions, 0 elsewhere."""
        x_T = x_K.new_zeros(self.mask_T.numel())
        x_T[self.mask_T] = x_K
        return x_T


@dataclass(frozen=True)
class Groups:
    """Statistics of each group's valid values, as [V] fp64: each value gets its group's statistic.

    They are computed in two passes.
    """

    group_V: Tensor  # [V] int64: 0..G - 1, and G for values that are not valid
    size_V: Tensor  # [V] fp64: valid values in the group; 0 for values that are not valid

    @classmethod
    def of(cls, group_V: Tensor, valid_V: Tensor) -> "Groups":
        ids_G, group_V = torch.unique(group_V, return_inverse=True)
        group_V = torch.where(valid_V, group_V, ids_G.numel())
        return cls(group_V, torch.bincount(group_V)[group_V].double() * valid_V)

    def sum(self, x_V: Tensor) -> Tensor:
        x_V = torch.where(self.size_V > 0, x_V.double(), 0)
        return x_V.new_zeros(x_V.numel() + 1).index_add(0, self.group_V, x_V)[self.group_V]

    def centre(self, x_V: Tensor) -> Tensor:
        """Returns x minus the group's mean; exactly 0 where the values of a group differ only by
        rounding.
        """
        size_V = self.size_V.clamp(min=1)
        mean_V = self.sum(x_V) / size_V
        mean_V += self.sum(x_V - mean_V) / size_V  # removes the rounding of the first pass
        centred_V = x_V.double() - mean_V
        differs_V = centred_V.abs() > 1e-12 * mean_V.abs().clamp(min=1)
        return torch.where((self.size_V > 0) & (self.sum(differs_V) > 0), centred_V, 0)

    def differ(self, x_V: Tensor) -> Tensor:
        """Returns [V] bool: True where the group's values differ by more than rounding."""
        return self.sum(self.centre(x_V) != 0) > 0

    def leave_one_out(self, centred_V: Tensor) -> Tensor:
        """Returns x minus the mean of the group's other values; 0 for a group of one.

        `centred_V` is x minus the mean of all values of the group.
        """
        return centred_V * self.size_V / (self.size_V - 1).clamp(min=1)

    def std(self, centred_V: Tensor, *, biased: bool, leave_one_out: bool = False) -> Tensor:
        """Returns, for each of V centred values, the standard deviation of its group.

        It is 0 in a group of fewer than two values.

        With `leave_one_out`, it is that of the group's other values, and 0 if what is left of the
        sum of squares is rounding.
        """
        squares_V = centred_V.square()
        total_V = self.sum(squares_V)
        size_V = self.size_V
        # without x, the mean moves by (x - mean) / (n - 1), and the sum of squares by
        # (x - mean)^2 n / (n - 1)
        if leave_one_out:
            rest_V = total_V - squares_V * size_V / (size_V - 1).clamp(min=1)
            total_V = torch.where(rest_V > 1e-12 * total_V, rest_V, 0)
            size_V = size_V - 1
        return (total_V / (size_V - (0 if biased else 1)).clamp(min=1)).sqrt()


def _sums(x_T: Tensor, cu_seqlens: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums segments, none of which may be empty; numpy is several times faster than torch."""
    if x_T.requires_grad or x_T.device.type != "cpu":
        return torch.segment_reduce(x_T.to(dtype), "sum", offsets=cu_seqlens)
    starts = cu_seqlens[:-1].numpy()
    name = str(dtype).removeprefix("torch.")
    return torch.from_numpy(np.add.reduceat(x_T.numpy(), starts, dtype=name))
