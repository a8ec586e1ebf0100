"""What the checksum must see: everything that plain sums miss."""

from __future__ import annotations

import pytest
import torch

from megarl.weights.digest import digest

SIZES = (1, 3, 1 << 14, (1 << 14) + 1, 100_003, 3 << 20)  # below, at and beyond a block and a strip


def value(flat: torch.Tensor) -> int:
    return int(digest(flat))


def noise(size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_same_bytes_same_digest(size, dtype):
    flat = noise(size).to(dtype)
    assert value(flat) == value(flat.clone())
    assert value(flat) == value(flat.view(torch.uint8))  # of bytes, not of numbers


@pytest.mark.parametrize("size", SIZES)
def test_one_bit_anywhere(size):
    flat = noise(size)
    before = value(flat)
    for byte in {0, 2 * size - 1, size, size // 3}:
        for bit in (0, 7):
            changed = flat.clone()
            changed.view(torch.uint8)[byte] ^= 1 << bit
            assert value(changed) != before


def test_moved_slices():
    flat = noise(200_000, torch.float32)
    before = value(flat)
    for length, one, other in ((1, 0, 7), (2, 10, 30_000), (1 << 14, 0, 1 << 14), (1 << 14, 0, 100_000)):
        swapped = flat.clone()
        swapped[one : one + length], swapped[other : other + length] = (
            flat[other : other + length],
            flat[one : one + length],
        )
        assert value(swapped) != before
    assert value(flat.roll(1)) != before
    signs = flat.clone()
    signs[[5, 9]] *= -1  # two top bits: a plain sum of words does not change
    assert (
        int(signs.view(torch.int32).sum(dtype=torch.int64)) % 2**32
        == int(flat.view(torch.int32).sum(dtype=torch.int64)) % 2**32
    )
    assert value(signs) != before


def test_length_counts():
    assert value(torch.zeros(4)) != value(torch.zeros(8))
    assert value(torch.zeros(0)) == 0
