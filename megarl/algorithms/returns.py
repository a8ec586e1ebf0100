"""Sums from each trainable token to the end of its row. False positions are skipped, never walked through.

The True positions of each row are laid out last one first in a rectangle [N, L], so a sum from the end is a
running sum along a row, and rows never mix.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.segments import Rows, clean

__all__ = ["reward_to_go", "td_lambda"]


@dataclass(frozen=True, slots=True)
class _FromEnd:
    """Where each True position goes: flat index row * L + (True positions after it in the row)."""

    slot_T: Tensor  # [T]; meaningless where the mask is False
    rows: Rows
    shape: tuple[int, int]

    @classmethod
    def of(cls, rows: Rows) -> _FromEnd:
        width = max(int(rows.num_tokens_N.max()), 1) if rows.num_tokens_N.numel() else 1
        until_T = rows.mask_T.cumsum(0)
        slot_T = rows.row_T * width + rows.num_tokens_N.cumsum(0)[rows.row_T] - until_T
        return cls(slot_T, rows, (rows.num_tokens_N.numel(), width))

    def lay(self, x_T: Tensor) -> Tensor:
        x_NL = torch.zeros(self.shape, dtype=x_T.dtype, device=x_T.device)
        x_NL.view(-1)[self.slot_T[self.rows.mask_T]] = x_T[self.rows.mask_T]
        return x_NL

    def pick(self, x_NL: Tensor) -> Tensor:
        x_T = torch.zeros(self.slot_T.numel(), dtype=x_NL.dtype, device=x_NL.device)
        x_T[self.rows.mask_T] = x_NL.reshape(-1)[self.slot_T[self.rows.mask_T]]
        return x_T


def reward_to_go(rewards_T: Tensor, rows: Rows, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_next(t), where next(t) is the next True position of the row. `rewards_T` is clean."""
    if gamma == 1.0:
        return clean(_sums_to_end(rewards_T, rows), rows.mask_T)
    slots = _FromEnd.of(rows)
    return slots.pick(_running_sum(slots.lay(rewards_T), gamma))


def td_lambda(rewards_T: Tensor, values_T: Tensor, rows: Rows, *, gamma: float, lam: float) -> Tensor:
    """A_t = delta_t + gamma lam A_next, delta_t = r_t + gamma V_next - V_t; V is 0 after the last True position."""
    slots = _FromEnd.of(rows)
    values_NL = slots.lay(values_T)
    next_NL = torch.nn.functional.pad(values_NL[:, :-1], (1, 0))
    return slots.pick(_running_sum(slots.lay(rewards_T) + gamma * next_NL - values_NL, gamma * lam))


def _sums_to_end(x_T: Tensor, rows: Rows) -> Tensor:
    """Undiscounted, so holes add nothing and need not be skipped: one running sum a row, read backwards. numpy does
    this in place and several times faster than any layout of the rows in a rectangle."""
    x, sums = x_T.detach().cpu().numpy(), np.empty(x_T.numel())
    for start, end in pairwise(rows.cu_seqlens.tolist()):
        np.cumsum(x[start:end][::-1], out=sums[start:end][::-1])
    return torch.from_numpy(sums).to(x_T)


def _running_sum(x_NL: Tensor, decay: float) -> Tensor:
    """y_l = x_l + decay y_(l-1) along each row."""
    if decay == 1.0:
        return x_NL.cumsum(1)
    y_LN = x_NL.T.contiguous()
    for before_N, y_N in pairwise(y_LN):
        y_N.add_(before_N, alpha=decay)
    return y_LN.T
