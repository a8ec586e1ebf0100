"""Checksums that moved bytes cannot fool: position-weighted, exact, order-free, the same on CPU and GPU.

digest(flat)         of a bucket: multilinear hashing (Lemire & Kaser, 2014) of 32-bit words, sum of word_i x weight_i
                     mod 2^64 with fixed random 64-bit weights, per block of 16K words, then over the blocks' halves
placed(part, start)  of a part of a tensor: each word weighs what its place in the whole tensor says, so the parts'
                     sums add up to the whole's, however it is cut: "the right slice in the right place", without
                     a full tensor anywhere

Plain integer sums and xor miss swapped slices, which is the very fault a resharding can have. No claim against an
adversary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["digest", "placed"]

BLOCK = 1 << 14  # words
STRIP = {"cpu": 4, "cuda": 512}  # blocks whose widened words exist at once: 512 KiB stay in a core's cache


def digest(flat: Tensor) -> Tensor:
    """int64 scalar on `flat`'s device. The bytes of `flat` [n], of any dtype, must be contiguous."""
    data = flat.contiguous().view(torch.uint8)
    whole = data.numel() - data.numel() % (4 * BLOCK)
    tail = pad(data[whole:], (0, -data.numel() % (4 * BLOCK)))  # zero words add nothing; the length is added at the end
    inner = _weights(BLOCK, 0, flat.device)
    parts = (*data[:whole].split(4 * BLOCK * STRIP[flat.device.type]), tail)
    strips = [part.view(torch.int32).view(-1, BLOCK) for part in parts]
    sums = torch.cat([_dot(strip, inner) for strip in strips])
    halves = sums.view(torch.int32).to(torch.int64)  # [2 x blocks]
    outer = _weights(1 << max(1, halves.numel() - 1).bit_length(), 1, flat.device)[: halves.numel()]
    return (halves * outer).sum() + data.numel()


def placed(part: Tensor, start: Sequence[int]) -> Tensor:
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
    step = max(1, STRIP[part.device.type] * BLOCK // words.shape[1])
    for lines, weight in zip(words.split(step), rows.split(step), strict=True):
        total += (_dot(lines, columns) * weight).sum()
    return total


def _dot(words: Tensor, weights: Tensor) -> Tensor:
    """[n] int64: each row of `words` [n, w] int32 times `weights` [w] int64, mod 2^64."""
    wide = words.to(torch.int64)
    return wide @ weights if wide.device.type == "cpu" else (wide * weights).sum(1)  # CUDA has no product of int64


def _weights_at(start: int, count: int, table: int, device: torch.device) -> Tensor:
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
