"""Checksums that moved bytes cannot fool: position-weighted, exact, order-free, the same on CPU and GPU.

checksum(flat)                    of a message: 64-bit words in rows of 1024; the sums of the rows and of the columns
                                  mod 2^64, each half of a sum times by a fixed random 64-bit weight. Changed, moved or
                                  swapped words are detected unless four or more cancel out in rows and columns alike
positional_checksum(part, start)  of a part of a tensor: each word is weighted by its position in the whole tensor, so
                                  the sums of the parts add up to that of the whole, however it is split. This verifies
                                  "the right slice in the right place" without gathering a full tensor
copy_and_verify(part, into)       when both sides are local: copies, reads back and compares bit by bit

Plain integer sums and xor miss swapped slices, which is the very fault a resharding can have. No claim against an
adversary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["checksum", "copy_and_verify", "positional_checksum"]

ROW = 1 << 10  # 64-bit words
ROWS = 1 << 5  # summed both ways while they are in a CPU core's cache: 256 KiB
BLOCK = 1 << 14  # 32-bit words
STRIP = 1 << 23  # 32-bit words that a GPU widens at once
STRIP_BYTES = 1 << 18
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(flat: Tensor) -> Tensor:
    """int64 scalar on `flat`'s device. The bytes of `flat` [n], of any dtype, must be contiguous."""
    data = flat.contiguous().view(torch.uint8)
    whole = data.numel() - data.numel() % (8 * ROW)
    tail = pad(data[whole:], (0, -data.numel() % (8 * ROW)))  # zero words add nothing; the length is added at the end
    rows, columns = [], torch.zeros(ROW, dtype=torch.int64, device=flat.device)
    for part in (data[:whole], tail):
        words = part.view(torch.int64).view(-1, ROW)
        for strip in words.split(ROWS) if flat.device.type == "cpu" else (words,):
            rows.append(strip.sum(1))
            columns += strip.sum(0)
    sums = torch.cat(rows)
    return _halves(sums, 0) + _halves(columns, 1) + data.numel()


def _halves(sums: Tensor, table: int) -> Tensor:
    """`sums` [n] int64, each half of one weighed on its own: a flipped top bit of two would vanish mod 2^64."""
    halves = sums.view(torch.int32).to(torch.int64)
    return (halves * _weights_at(0, halves.numel(), table, sums.device)).sum()


def copy_and_verify(part: Tensor, into: Tensor) -> Tensor:
    """Copy `part` to `into`, of its shape and dtype; int64 scalar, 1 when a bit of it reads back otherwise.

    On a CPU while it is in the cache; a GPU is not waited for.
    """
    if part.device.type == "cpu" and part.dim() and part.numel():
        lines = max(1, STRIP_BYTES * part.shape[0] // part.nbytes)
        pairs = zip(part.split(lines), into.split(lines), strict=True)
        return torch.tensor(sum(_write_strip(*pair) for pair in pairs))
    into.copy_(part)
    return (_integers(into) != _integers(part)).any().to(torch.int64)


def _write_strip(part: Tensor, into: Tensor) -> bool:
    into.copy_(part)
    return not np.array_equal(_integers(into).numpy(), _integers(part).numpy())  # vectorised, as torch.equal is not


def _integers(x: Tensor) -> Tensor:
    """The bits of it: NaN equals NaN, and -0 is not 0."""
    return x.view(INTEGERS[x.element_size()])


def positional_checksum(part: Tensor, start: Sequence[int]) -> Tensor:
    """int64 scalar of the part that begins at `start` of its tensor. Parts that tile the tensor add up (mod 2^64).

    A word at (i, .., j) weighs w0[i] x .. x wn[j]; j counts 32-bit words of a row, which parts may cut anywhere.
    """
    if not part.dim():
        part, start = part[None], (0,)
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    if not part.numel():
        return total
    data = part.contiguous().view(torch.uint8).view(-1, part.shape[-1] * part.element_size())  # [rows, bytes]
    first = start[-1] * part.element_size()
    end = first + data.shape[1]
    if first % 4 or end % 4:  # a word cut in two: what is not ours counts as zero here and is added elsewhere
        data = pad(data, (first % 4, -end % 4))
    words = data.view(torch.int32)
    columns = _weights_at(first // 4, words.shape[1], 0, part.device)
    rows = torch.ones(1, dtype=torch.int64, device=part.device)
    for axis, (at, size) in enumerate(zip(start[:-1], part.shape[:-1], strict=True), 1):
        rows = (rows[:, None] * _weights_at(at, size, axis + 1, part.device)).flatten()  # [rows so far]
    return total + (_dots(words, columns) * rows).sum()


def _dots(words: Tensor, weights: Tensor) -> Tensor:
    """[n] int64: each row of `words` [n, w] int32 times `weights` [w] int64, mod 2^64."""
    if words.device.type == "cpu":  # vectorised, as torch's product of integers is not, and widened by the way
        return torch.from_numpy(np.einsum("ij,j->i", words.numpy(), weights.numpy()))
    step = max(1, STRIP // words.shape[1])
    return torch.cat([(lines.to(torch.int64) * weights).sum(1) for lines in words.split(step)])


def _weights_at(start: int, count: int, table: int, device: torch.device) -> Tensor:
    """[count] of a table, from `start`."""
    return _weights(1 << max(8, (start + count - 1).bit_length()), table, device)[start : start + count]


@lru_cache(maxsize=64)
def _weights(count: int, table: int, device: torch.device) -> Tensor:
    """[count] int64, fixed: splitmix64 of the position. Computed on the CPU so that every device has the same."""
    x = torch.arange(1, count + 1, dtype=torch.int64) * -7046029254386353131
    x = x + torch.tensor(table) * 0x632BE59BD9B4E019  # as a tensor: it wraps, which a Python int does not
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return (x ^ _shift(x, 31)).to(device)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
