"""Checks that need a GPU: checksums are the CPU's."""

from __future__ import annotations

import pytest
import torch

from megarl.weights.sync.checksum import checksum, checksums, positional_checksum
from megarl.weights.sync.copies import copy_and_verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_checksums_are_the_same_on_both():
    flat = torch.randn(5_000_003).bfloat16()
    assert int(checksum(flat)) == int(checksum(flat.cuda()))
    part = flat[: 1000 * 999].view(1000, 999)
    assert int(positional_checksum(part, (7, 11))) == int(positional_checksum(part.cuda(), (7, 11)))
    several = [flat[:size] for size in (0, 3, 4096, 100_001)]
    assert checksums([x.cuda() for x in several]).tolist() == checksums(several).tolist()


def test_what_is_written_in_batches_is_read_back():
    flat = torch.randn(600 * 12, device="cuda").bfloat16()
    parts = [part.view(4, 3) for part in flat.split(12)]
    memory = torch.zeros(600, 4, 6, device="cuda", dtype=torch.bfloat16)
    into = [
        x[:, :3] if number % 2 else x.view(-1)[:12].view(4, 3) for number, x in enumerate(memory)
    ]
    assert not copy_and_verify(flat, parts, into)
    assert all(torch.equal(x, part) for x, part in zip(into, parts, strict=True))
    into[7] = memory[8].view(-1)[1:13].view(4, 3)  # overwrites part of another
    assert copy_and_verify(flat, parts, into)
