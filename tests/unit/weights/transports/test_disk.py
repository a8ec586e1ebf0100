"""Threads as ranks that share a folder and nothing else: a sync over files is a sync, and who stays away is named."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks.sync import Memory, held, room_for, view
from megarl.config.random_model import hf_config
from megarl.config.schema import Create
from megarl.layout import Parallel
from megarl.models.registry import hf_shapes, parse_model
from megarl.types import CheckFailed
from megarl.weights.publish import Publisher
from megarl.weights.transports.disk import Disk

SHAPE = parse_model(hf_config(Create(family="qwen3", tied=True, hidden=32, heads=4, kv_heads=2, vocab=67)), "create")
SHAPES = hf_shapes(SHAPE)
WORLD = 4


def part(whole, box):
    return whole[box.name][tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]


def sync(folder: Path, rank: int) -> int:
    """Pipeline 2 x tensor 2 into two engines of tensor 2, twice; bytes received of all ranks."""
    generator = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(size, generator=generator) for name, size in SHAPES.items()}
    sources = [held(SHAPE, Parallel(pipeline=2), WORLD, r) for r in range(WORLD)]
    mine, engine = room_for(sources[rank]), Memory(held(SHAPE, Parallel(tensor=2), 2, rank % 2))
    publisher = Publisher.connect(
        sources=sources,
        expected=SHAPES,
        parameters=lambda: mine,
        receiver=engine,
        ranks_per_replica=2,
        transport=Disk(folder, rank=rank, world=WORLD, timeout_s=60),
        dtype=torch.float32,
        bucket_bytes=16 << 10,
    )
    for version in (1, 2):
        whole = {name: tensor + version for name, tensor in whole.items()}
        for box in sources[rank]:
            view(mine, box).copy_(part(whole, box))
        report = publisher.publish(version=version)
        assert engine.version == version
        for box in engine.boxes:
            assert torch.equal(view(engine.memory, box), part(whole, box))
    return report.bytes_received


def test_a_sync_over_files(tmp_path):
    with ThreadPoolExecutor(WORLD) as ranks:
        received = list(ranks.map(lambda rank: sync(tmp_path, rank), range(WORLD)))
    assert received[0] > 0 and len(set(received)) == 1
    assert not list(tmp_path.glob("*bucket*")), "what was read is gone"
    assert len(list(tmp_path.iterdir())) <= 2 * WORLD, "old words are gone"


def test_who_does_not_come_is_named(tmp_path):
    one = Disk(tmp_path, rank=0, world=3, timeout_s=0.05)
    Disk(tmp_path, rank=1, world=3)
    with pytest.raises(CheckFailed, match="ranks 1, 2 of 3 did not come to the sync of weights"):
        one.barrier("the sync of weights")
    wait = one.start({}, {2: torch.zeros(10)})
    with pytest.raises(CheckFailed, match="rank 2 of 3 did not come to a bucket of 40 bytes"):
        wait()


def test_a_bucket_that_is_half_written_is_not_there(tmp_path):
    one, other = (Disk(tmp_path, rank=rank, world=2, timeout_s=0.05) for rank in range(2))
    wait = one.start({}, {1: torch.zeros(3)})
    (tmp_path / ".0-bucket-1-0.safetensors.part").write_bytes(b"half")
    with pytest.raises(CheckFailed):
        wait()
    into = torch.zeros(3, dtype=torch.bfloat16)
    other.start({0: torch.ones(3, dtype=torch.bfloat16)}, {})()
    Disk(tmp_path, rank=0, world=2).start({}, {1: into})()
    assert bool((into == 1).all())
