"""Property tests: the same examples every time, and no deadline on a busy machine. A group of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("megarl", deadline=None, max_examples=15, derandomize=True)
settings.load_profile("megarl")


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
