"""Checks that need a GPU: checksums are the CPU's, FP8 is the CPU's, CUDA IPC moves what a collective would."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megarl.weights.checksum import checksum, positional_checksum
from megarl.weights.quantize import quantise
from megarl.weights.transports.ipc import Ipc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_checksums_are_the_same_on_both():
    flat = torch.randn(5_000_003).bfloat16()
    assert int(checksum(flat)) == int(checksum(flat.cuda()))
    part = flat[: 1000 * 999].view(1000, 999)
    assert int(positional_checksum(part, (7, 11))) == int(positional_checksum(part.cuda(), (7, 11)))


def test_fp8_is_the_same_on_both():
    weight = torch.randn(300, 260).bfloat16()
    for ours, theirs in zip(quantise(weight), quantise(weight.cuda()), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.cpu().view(torch.uint8))


def _exchange(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    transport, other = Ipc(timeout_s=60), 1 - rank
    for round_, size in enumerate((1000, 500, 4000, 4000, 8)):
        mine = torch.full((size,), 10.0 * round_ + rank, device="cuda")
        into = torch.zeros(size, device="cuda")
        transport.start({other: mine}, {other: into})()
        assert bool((into == 10.0 * round_ + other).all()), f"round {round_}"
    dist.barrier()
    dist.destroy_process_group()


def test_cuda_ipc_between_two_processes(tmp_path):
    """On one GPU or two. Buffers shrink, grow and are used again: none may be read before it is written."""
    mp.spawn(_exchange, (str(tmp_path),), 2)
