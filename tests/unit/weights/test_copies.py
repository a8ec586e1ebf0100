"""Pieces that are written in batches, and read back: what a batch must not miss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megarl.weights.sync import copies
from megarl.weights.sync.copies import copy_all, copy_and_verify

Write = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]
# on a CPU, and as on any other device
WRITES = pytest.mark.parametrize("write", [copy_and_verify, copies._write_batches])


def tiles(flat: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
    """The parts of a message."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


@WRITES
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (300_000,), (1000, 3, 129)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_what_is_written_is_read_back(shape, dtype, write: Write):
    flat = torch.randn(torch.Size(shape).numel()).to(dtype)
    if flat.numel():
        flat[0] = float("nan")
    memory = (
        torch.zeros(*shape[:-1], 2 * shape[-1]).to(dtype) if shape else torch.zeros(()).to(dtype)
    )
    into = memory[..., : shape[-1]] if shape else memory
    assert not write(flat, [flat.view(shape)], [into])
    assert torch.equal(into.float().nan_to_num(), flat.view(shape).float().nan_to_num())


@WRITES
@pytest.mark.parametrize("batch_bytes", [1, 1000, 1 << 27])
def test_every_piece_of_a_message_arrives_in_its_place(
    write: Write, batch_bytes, monkeypatch: pytest.MonkeyPatch
):
    """Rows, columns, transposed and wider ones, more than a kernel takes, in batches of any size."""
    monkeypatch.setattr(copies, "BATCH_BYTES", batch_bytes)
    shapes = [(3, 4), (8, 2), (5,), (2, 3), (4, 4), (1, 6, 2), ()] * 30
    flat = torch.randn(30 * sum(torch.Size(shape).numel() for shape in shapes[:7])).bfloat16()
    parts = tiles(flat, *shapes)
    into = []
    for number, part in enumerate(parts):
        dtype = torch.float32 if number % 7 == 4 else torch.bfloat16
        if number % 7 == 1:
            into.append(torch.zeros(8, 6, dtype=dtype)[:, 1:3])
        elif number % 7 == 3:
            into.append(torch.zeros(3, 2, dtype=dtype).T)
        else:
            into.append(torch.zeros(part.shape, dtype=dtype))
    assert not write(flat, parts, into)
    assert all(
        torch.equal(there, part.to(there.dtype)) for there, part in zip(into, parts, strict=True)
    )
    around = [x._base for x in into[1::7] if x._base is not None]
    assert all(not x[:, 0].any() and not x[:, 3:].any() for x in around), "nothing beside it"


@WRITES
def test_memory_that_does_not_keep_what_is_written_is_seen(write: Write):
    # elements that share a place: the last to come stays
    flat = torch.arange(8.0)
    assert write(flat, [flat.view(4, 2)], [torch.zeros(5).as_strided((4, 2), (1, 1))])
    wide, narrow = torch.empty(4, 2), torch.randn(8).bfloat16()
    assert not write(narrow, [narrow.view(4, 2)], [wide])
    assert wide.equal(narrow.view(4, 2).float())
    short = torch.randn(8)
    assert write(short, [short], [torch.zeros(8, dtype=torch.bfloat16)]), "a dtype that rounds"


def test_one_piece_among_many_that_overwrites_another_is_seen(monkeypatch: pytest.MonkeyPatch):
    for batch_bytes in (64, 1 << 27):
        monkeypatch.setattr(copies, "BATCH_BYTES", batch_bytes)
        flat = torch.arange(800.0)
        memory = torch.zeros(800)
        parts = list(flat.split(4))
        into = list(memory.split(4))
        for number in (0, 61, 62, 150, 198):  # not the last of a batch
            beside = list(into)
            beside[number] = memory[4 * number + 1 : 4 * number + 5]  # off by one element
            assert copies._write_batches(flat, parts, beside), number
        assert not copies._write_batches(flat, parts, into)


def test_a_cpu_reads_back_as_soon_as_it_has_written():
    twice = torch.zeros(1 << 17).as_strided((2, 1 << 17), (0, 1))  # strips of their own
    flat = torch.randn(1 << 18)
    assert not copy_and_verify(flat, [flat.view(2, -1)], [twice])


def test_pieces_are_copied_whatever_their_strides_and_dtypes():
    pieces = [torch.randn(0, 2), torch.randn(6, 4)[:, 1:3], torch.randn(4, 6).T, torch.randn(())]
    into = [torch.empty(x.shape, dtype=torch.float64) for x in pieces]
    copy_all(into, pieces)
    assert all(
        torch.equal(there, piece.double()) for there, piece in zip(into, pieces, strict=True)
    )
    copy_all([], [])
