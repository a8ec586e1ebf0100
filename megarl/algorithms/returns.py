"""Sums from each span of a row to the row's end, discounted by the spans between.

A sum from the end is a running sum over the spans, last one first, taken over a few rows that fit a cache. Without
discount one sum runs through them all, and each row takes off what the rows before it came to. With discount, or where
such a difference of large numbers would lose small ones, rows are laid out in a rectangle [N, L] and never mix.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

__all__ = ["sums_to_end", "td_lambda"]

CELLS = 1 << 17  # of a rectangle: 1 MiB in fp64
LARGE = 1e6  # up to here a running sum in fp64 is good to 1e-10


def sums_to_end(x_K: Tensor, bounds: np.ndarray, *, decay: float = 1.0) -> Tensor:
    """y_k = x_k + decay y_(k+1) within each row; accumulated in fp64 where decay is 1, as it is where not.

    Row n is x_K[bounds[n]:bounds[n + 1]].
    """
    lengths = np.diff(bounds)[::-1]
    sums = np.empty_like(x_K.numpy())
    backwards, sums_backwards = x_K.numpy()[::-1], sums[::-1]
    start = 0
    for rows, width in _rectangles(lengths):
        end = start + int(lengths[rows].sum())
        x = backwards[start:end]
        y = _through(x, lengths[rows]) if decay == 1.0 else None
        sums_backwards[start:end] = _apart(x, lengths[rows], width, decay) if y is None else y
        start = end
    return torch.from_numpy(sums)


def _through(x: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
    """[spans] fp64: one running sum through all rows; None where it gets too large to be taken off again."""
    if not x.size:
        return None
    running = torch.from_numpy(x.astype(np.float64)).cumsum_(0)
    low, high = (bound.item() for bound in running.aminmax())
    if not max(-low, high) <= LARGE:  # nor where it is not a number
        return None
    y = running.numpy()
    firsts = lengths.cumsum() - lengths
    before = np.where(firsts > 0, y[firsts - 1], 0)
    y -= np.repeat(before, lengths)
    return y


def _apart(x: np.ndarray, lengths: np.ndarray, width: int, decay: float) -> np.ndarray:
    """[spans]: each row by itself."""
    is_cell = np.arange(width, dtype=np.int32) < lengths[:, None].astype(np.int32)
    x_NL = np.zeros(is_cell.shape, dtype=x.dtype)
    x_NL[is_cell] = x
    y_NL = torch.from_numpy(x_NL)
    y_NL = y_NL.cumsum(1) if decay == 1.0 else _decayed(y_NL, decay)
    return y_NL.numpy()[is_cell]


def td_lambda(rewards_K: Tensor, values_K: Tensor, bounds: np.ndarray, *, gamma: float, lam: float) -> Tensor:
    """A_k = delta_k + gamma lam A_(k+1), delta_k = r_k + gamma V_(k+1) - V_k; V is 0 after the last of a row."""
    next_K = torch.cat([values_K[1:], values_K.new_zeros(1)])[: values_K.numel()]
    ends = bounds[1:][bounds[1:] > bounds[:-1]] - 1
    next_K[torch.from_numpy(ends)] = 0
    return sums_to_end(rewards_K + gamma * next_K - values_K, bounds, decay=gamma * lam)


def _rectangles(lengths: np.ndarray) -> Iterator[tuple[slice, int]]:
    """(rows, width), all rows in order; at most CELLS cells, or one row."""
    first, width = 0, 0
    for row, length in enumerate(lengths.tolist()):
        wider = length if length > width else width
        if row > first and wider * (row + 1 - first) > CELLS:
            yield slice(first, row), width
            first, wider = row, length
        width = wider
    yield slice(first, len(lengths)), width


def _decayed(y_NL: Tensor, decay: float) -> Tensor:
    """y_l = x_l + decay y_(l-1) along each row: each pass doubles how far a sum reaches."""
    reach = 1
    while reach < y_NL.shape[1] and decay**reach:
        y_NL[:, reach:] += decay**reach * y_NL[:, :-reach]
        reach *= 2
    return y_NL
