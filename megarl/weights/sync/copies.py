"""Copies many pieces of tensors at once: a GPU takes longer to start a small copy than to run it.

    pieces --batches of at most BATCH_BYTES--> groups of equal dtype and layout --> few kernels

A written batch is read back from where it was written, and all of its bits are compared."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import reduce

import numpy as np
import torch
from torch import Tensor

BATCH_BYTES = 1 << 27  # a batch may need as much memory again
STRIP_BYTES = 1 << 18
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_all(into: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    """Copies each piece into the tensor of the same shape in `into`. Dtypes may differ."""
    for batch in _batches(pieces):
        groups = defaultdict(list)
        for pair in zip(into[batch], pieces[batch], strict=True):
            target, piece = pair
            rest = None if piece.is_contiguous() else piece.shape[1:]
            groups[target.dtype, piece.dtype, target.is_contiguous(), rest].append(pair)
        for (_, _, is_dense, rest), pairs in groups.items():
            targets, sources = map(list, zip(*pairs, strict=True))
            if is_dense and rest is not None and sources[0].device.type != "cpu":
                # unlike _foreach_copy_, cat copies strided tensors in one kernel
                sources = torch.cat(sources).split([len(source) for source in sources])
                rest = None
            if is_dense and rest is None:  # the same strides in both lists
                targets = [target.flatten() for target in targets]
                sources = [source.flatten() for source in sources]
            torch._foreach_copy_(targets, sources)  # type: ignore[attr-defined]


def copy_and_verify(flat: Tensor, parts: Sequence[Tensor], into: Sequence[Tensor]) -> Tensor:
    """Copies `parts`, which tile `flat` [n] in order, into the tensors of the same shapes in
    `into`. Returns (bool scalar) True if any bit reads back differently. A tensor of a wider dtype
    (a router that the engine keeps in fp32) is read back in the dtype of its part. A CPU compares
    while the data is in its cache; a GPU is not synchronized."""
    if flat.device.type == "cpu":
        return torch.tensor(any([*map(_write_strips, parts, into)]))
    return _write_batches(flat, parts, into)


def _write_batches(flat: Tensor, parts: Sequence[Tensor], into: Sequence[Tensor]) -> Tensor:
    batches = list(_batches(parts))
    sizes = [part.nbytes // flat.itemsize for part in parts]
    wrong = []
    regions = flat.split([sum(sizes[batch]) for batch in batches])
    for batch, region in zip(batches, regions, strict=True):
        read = torch.empty_like(region)
        back = [
            x.view(part.dtype).view(part.shape)
            for x, part in zip(read.split(sizes[batch]), parts[batch], strict=True)
        ]
        copy_all(into[batch], parts[batch])
        copy_all(back, into[batch])
        wrong.append((_integers(read) != _integers(region)).any())
    return reduce(torch.logical_or, wrong)


def _batches(pieces: Sequence[Tensor]) -> Iterator[slice]:
    """Yields ranges of pieces with at most BATCH_BYTES, unless a single piece is larger."""
    first = 0
    size = 0
    for number, piece in enumerate(pieces):
        size += piece.nbytes
        if size > BATCH_BYTES and number > first:
            yield slice(first, number)
            first = number
            size = piece.nbytes
    yield slice(first, len(pieces))


def _write_strips(part: Tensor, into: Tensor) -> bool:
    part, into = torch.atleast_1d(part, into)
    lines = max(1, STRIP_BYTES * len(part) // max(1, part.nbytes))
    return any([*map(_write_strip, part.split(lines), into.split(lines))])


def _write_strip(part: Tensor, into: Tensor) -> bool:
    read = into.copy_(part).to(part.dtype)
    # faster than torch.equal
    return not np.array_equal(_integers(read).numpy(), _integers(part).numpy())


def _integers(x: Tensor) -> Tensor:
    """Returns the bits of `x` as integers: NaN equals NaN, and -0 differs from 0."""
    return x.view(INTEGERS[x.element_size()])
