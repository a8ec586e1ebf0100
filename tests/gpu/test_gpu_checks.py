"""Checks that need a GPU: checksums are the CPU's."""

from __future__ import annotations

import pytest
import torch

from megarl.weights.sync.checksum import checksum, positional_checksum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_checksums_are_the_same_on_both():
    flat = torch.randn(5_000_003).bfloat16()
    assert int(checksum(flat)) == int(checksum(flat.cuda()))
    part = flat[: 1000 * 999].view(1000, 999)
    assert int(positional_checksum(part, (7, 11))) == int(positional_checksum(part.cuda(), (7, 11)))
