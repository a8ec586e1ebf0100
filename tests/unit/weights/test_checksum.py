"""What the checksum must see: everything that plain sums miss."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from megarl.weights.sync.checksum import _weights_at, checksum, checksums, positional_checksum

SIZES = (1, 3, 1 << 14, (1 << 14) + 1, 100_003, 3 << 20)  # below, at and beyond a block and a strip


def value(flat: torch.Tensor) -> int:
    return int(checksum(flat))


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
    for length, one, other in (
        (1, 0, 7),
        (2, 10, 30_000),
        (1 << 14, 0, 1 << 14),
        (1 << 14, 0, 100_000),
    ):
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


def cut(shape: tuple[int, ...], at: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Every corner of a tensor cut once along each axis."""
    axes = [((0, a), (a, n)) for a, n in zip(at, shape, strict=True)]
    return [tuple(slice(*ends) for ends in corner) for corner in itertools.product(*axes)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("shape", "at"),
    [((7,), (3,)), ((9, 13), (4, 5)), ((9, 13), (0, 1)), ((3, 5, 66), (1, 2, 33))],
    ids=str,
)
def test_parts_add_up_however_they_are_cut(shape, at, dtype):
    """Odd columns of narrow types cut a 32-bit word in two."""
    whole = (100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    sums = [
        positional_checksum(whole[corner], [axis.start for axis in corner])
        for corner in cut(shape, at)
    ]
    assert int(sum(sums)) == int(positional_checksum(whole, (0,) * len(shape))) != 0


def test_the_right_slice_in_the_wrong_place_shows_although_plain_sums_agree():
    whole = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    swaps = {
        "rows": torch.cat([whole[32:], whole[:32]]),
        "columns": torch.cat([whole[:, 16:], whole[:, :16]], 1),
        "one row": whole[[1, 0, *range(2, 64)]],
        "transposed blocks": torch.cat(
            [whole[:, :16].reshape(32, 32), whole[:, 16:].reshape(32, 32)]
        ),
    }
    words = whole.view(torch.int32)
    for name, swapped in swaps.items():
        assert int(swapped.view(torch.int32).sum(dtype=torch.int64)) == int(
            words.sum(dtype=torch.int64)
        ), name
        assert int(torch.hash_tensor(swapped)) == int(torch.hash_tensor(whole)), (
            "xor does not see it either"
        )
        assert int(positional_checksum(swapped.contiguous(), (0, 0))) != int(
            positional_checksum(whole, (0, 0))
        ), name
    # what two ranks hold, each sure of its own place: the sum over ranks sees the swap
    halves = whole.split(32)
    right = int(positional_checksum(halves[0], (0, 0)) + positional_checksum(halves[1], (32, 0)))
    assert right == int(positional_checksum(whole, (0, 0)))
    assert right != int(
        positional_checksum(halves[1], (0, 0)) + positional_checksum(halves[0], (32, 0))
    )


def test_scalars_and_nothing():
    assert int(positional_checksum(torch.tensor(3.0), ())) != int(
        positional_checksum(torch.tensor(4.0), ())
    )
    assert int(positional_checksum(torch.zeros(0, 4), (0, 0))) == 0


def test_messages_that_are_summed_together_have_their_own_checksums():
    messages = [noise(size) for size in (*SIZES, 0, 4096)]
    together = checksums(messages).tolist()
    assert together == [value(message) for message in messages]
    assert len(set(together)) == len(messages)


def test_the_checksum_of_a_known_message():
    """Computed row by row in Python's integers, from the definition."""
    flat = noise(3 * 4096 + 5, torch.float32)
    data = flat.numpy().tobytes()
    data += bytes(-len(data) % 8192)
    words = np.frombuffer(data, dtype=np.uint64).reshape(-1, 1024)
    total = flat.nbytes
    for table, sums in enumerate((words.sum(1), words.sum(0))):
        halves = sums.view(np.uint32)
        weights = _weights_at(0, len(halves), table, flat.device).tolist()
        total += sum(
            int(half) * weight for half, weight in zip(signed(halves), weights, strict=True)
        )
    assert value(flat) % 2**64 == total % 2**64


def signed(halves: np.ndarray) -> list[int]:
    return halves.view(np.int32).tolist()


def test_the_memory_of_what_was_summed_can_be_offloaded() -> None:
    """numpy() would forbid to resize the storage that it shares."""
    weights = torch.randn(64)
    positional_checksum(weights[:32].view(4, 8), (0, 0))
    weights.untyped_storage().resize_(0)
