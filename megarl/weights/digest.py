"""A checksum that moved bytes cannot fool: position-weighted, exact, order-free, the same on CPU and GPU.

multilinear hashing (Lemire & Kaser, 2014) of 32-bit words: sum of word_i x weight_i mod 2^64 with fixed random
64-bit weights, per block of 16K words, then the same over the blocks' two halves. Plain integer sums miss
swapped slices, which is the very fault a resharding can have. No claim against an adversary.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["digest"]

BLOCK = 1 << 14  # words
STRIP = 64  # blocks whose widened words exist at once: 8 MiB


def digest(flat: Tensor) -> Tensor:
    """int64 scalar on `flat`'s device. The bytes of `flat` [n], of any dtype, must be contiguous."""
    data = flat.contiguous().view(torch.uint8)
    size = data.numel()
    data = pad(data, (0, -size % 4))  # zero words add nothing; the length is mixed in at the end
    words = data.view(torch.int32)
    words = pad(words, (0, -words.numel() % BLOCK)).view(-1, BLOCK)  # [blocks, BLOCK]
    inner = _weights(BLOCK, 0, flat.device)
    sums = torch.cat([(strip.to(torch.int64) * inner).sum(1) for strip in words.split(STRIP)] or [inner.new_zeros(0)])
    halves = sums.view(torch.int32).to(torch.int64)  # [2 x blocks]
    outer = _weights(1 << max(1, halves.numel() - 1).bit_length(), 1, flat.device)[: halves.numel()]
    return (halves * outer).sum() + size


@lru_cache(maxsize=64)
def _weights(count: int, table: int, device: torch.device) -> Tensor:
    """[count] int64, fixed: splitmix64 of the position. Computed on the CPU so that every device has the same."""
    x = torch.arange(1, count + 1, dtype=torch.int64) * -7046029254386353131 + table * 0x632BE59BD9B4E019
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return (x ^ _shift(x, 31)).to(device)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
