"""Checksums that detect moved and swapped data: position-weighted, exact, and identical on CPU and
GPU.

Plain integer sums and xor miss swapped slices, a typical resharding bug. These checksums are not
cryptographic."""

from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.weights.sync.copies import copy_all

ROW = 1 << 10  # 64-bit words per row
ROW_BYTES = 8 * ROW
ROWS = 1 << 5  # rows summed along both dims while they are in a CPU core's cache: 256 KiB
STRIP_WORDS = 1 << 23  # 32-bit words that a GPU converts to int64 at once


def checksum(flat: Tensor) -> Tensor:
    """Returns the checksum, int64 scalar, of a contiguous message `flat` [n] of any dtype. 64-bit
    words form rows of 1024; each half of a row's or column's sum mod 2^64 is multiplied by a fixed
    random 64-bit weight. Changed, moved or swapped words are detected unless four or more cancel
    out in rows and columns."""
    return checksums([flat])[0]


def checksums(flats: Sequence[Tensor]) -> Tensor:
    """Returns the `checksum` of each message, [messages] int64. Only the sums of whole rows take
    kernels of their own for each message on a GPU."""
    data = [flat.contiguous().view(torch.uint8) for flat in flats]
    device = data[0].device
    wholes = [x[: x.numel() // ROW_BYTES * ROW_BYTES] for x in data]  # whole rows
    rests = [x[len(whole) :] for x, whole in zip(data, wholes, strict=True)]
    # zeros after the rest of a message add nothing, as the length is added below
    tails = torch.zeros(len(data), ROW, dtype=torch.int64, device=device)
    copy_all(
        [tail[: len(x)] for tail, x in zip(tails.view(torch.uint8), rests, strict=True)], rests
    )
    rows = []
    columns = []
    counts = []  # halves of rows
    for whole, tail in zip(wholes, tails.sum(1).split(1), strict=True):
        words = whole.view(torch.int64).view(-1, ROW)
        sums = []
        for strip in words.split(ROWS) if device.type == "cpu" else (words,):
            rows.append(strip.sum(1))
            sums.append(strip.sum(0))
        rows.append(tail)
        columns.append(reduce(torch.add, sums))
        counts.append(2 * len(words) + 2)
    weights = torch.cat([_weights_at(0, count, 0, device) for count in counts])
    running = (_halves(torch.cat(rows)) * weights).cumsum(0)
    totals = torch.stack([running[end - 1] for end in accumulate(counts)])
    column_sums = _halves(torch.stack(columns) + tails) * _weights_at(0, 2 * ROW, 1, device)
    result = totals.diff(prepend=totals.new_zeros(1)) + column_sums.sum(1)
    torch._foreach_add_(result.unbind(), list(map(len, data)))  # type: ignore[attr-defined]
    return result


def _halves(sums: Tensor) -> Tensor:
    """Returns the 32-bit halves of `sums` [..., n] int64 as int64 [..., 2n]. Weighting whole sums
    would hide a top bit that is flipped in two of them."""
    return sums.view(torch.int32).to(torch.int64)


def positional_checksum(part: Tensor, start: Sequence[int]) -> Tensor:
    """Returns the checksum (int64 scalar) of the part of a tensor that begins at `start`. Checksums
    of parts that tile a tensor add up to that of the whole tensor (mod 2^64), however it is split.
    The weight of a word at (i, .., j) is w0[i] x .. x wn[j]; j counts 32-bit words of a row, which
    may be split anywhere."""
    if not part.dim():
        part = part[None]
        start = (0,)
    if not part.numel():
        return torch.zeros((), dtype=torch.int64, device=part.device)
    itemsize = part.element_size()
    row_bytes = part.shape[-1] * itemsize
    data = part.contiguous().view(torch.uint8).view(-1, row_bytes)
    first = start[-1] * itemsize
    end = first + row_bytes
    # the rest of a split word counts as zero here, and is added by the other part
    if first % 4 or end % 4:
        data = pad(data, (first % 4, -end % 4))
    words = data.view(torch.int32)
    columns = _weights_at(first // 4, words.shape[1], 0, part.device)
    rows = torch.ones(1, dtype=torch.int64, device=part.device)
    for dim, (offset, size) in enumerate(zip(start[:-1], part.shape[:-1], strict=True)):
        weights = _weights_at(offset, size, dim + 2, part.device)
        rows = (rows[:, None] * weights).flatten()  # [rows so far]
    return (_dot_rows(words, columns) * rows).sum()


def row_checksums(rows: Tensor) -> Tensor:
    """Returns [n] int64: a checksum of each row of `rows` [n, ...], which is on the CPU. Detects
    one changed or moved byte."""
    data = rows.contiguous().view(torch.uint8).flatten(1)
    words = pad(data, (0, -data.shape[1] % 4)).view(torch.int32)
    return _dot_rows(words, _weights_at(0, words.shape[1], 0, words.device))


def _dot_rows(words: Tensor, weights: Tensor) -> Tensor:
    """Returns [n] int64: each row of `words` [n, w] int32 times `weights` [w] int64, mod 2^64."""
    if words.device.type == "cpu":  # numpy vectorizes; DLPack leaves the storage resizable
        return torch.from_numpy(np.einsum("ij,j->i", np.from_dlpack(words), weights.numpy()))
    lines = max(1, STRIP_WORDS // words.shape[1])
    return torch.cat([(strip.to(torch.int64) * weights).sum(1) for strip in words.split(lines)])


def _weights_at(
    start: int,
    count: int,
    table: int,
    device: torch.device,
) -> Tensor:
    """Returns [count] weights of a table, from position `start`."""
    end = start + count
    return _weights(1 << max(8, (end - 1).bit_length()), table, device)[start:end]


@lru_cache(maxsize=64)
def _weights(count: int, table: int, device: torch.device) -> Tensor:
    """Returns [count] int64: splitmix64 of the position, computed on the CPU so that every device
    gets the same weights."""
    x = torch.arange(1, count + 1, dtype=torch.int64) * -7046029254386353131
    # a tensor wraps around, a Python int does not
    x = x + torch.tensor(table) * 0x632BE59BD9B4E019
    for bits, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        x = (x ^ ((x >> bits) & ((1 << (64 - bits)) - 1))) * factor  # a logical shift
    return x.to(device)
