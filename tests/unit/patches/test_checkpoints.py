"""torch and Megatron-Core still do what each row replaces; a test that fails names a row to delete."""

from __future__ import annotations

import queue
from importlib.util import find_spec
from pathlib import Path

import megarl.checkpoint  # noqa: F401 (before megatron.core)
from megarl.patches import checkpoints


def source(package: str, file: str) -> str:
    spec = find_spec(package)
    assert spec
    (folder,) = spec.submodule_search_locations or ()
    return (Path(folder) / file).read_text(encoding="utf-8")


def test_a_queue_has_a_process_of_its_own() -> None:
    text = source("megatron.core.dist_checkpointing.strategies", "filesystem_async.py")
    assert "_results_queue = ctx.Manager().Queue()\n" in text


def test_torch_unpickles_metadata() -> None:
    text = source("torch.distributed.checkpoint", "filesystem.py").partition("def read_metadata(")
    assert "metadata = pickle.load(metadata_file)\n" in text[2]


def test_torch_unpickles_objects() -> None:
    text = source("torch.distributed.checkpoint", "default_planner.py").partition("def load_bytes(")
    assert "weights_only=False" in text[2].partition("\n    def ")[0]


def test_each_write_has_its_own_queue() -> None:
    """What is left of one that failed must not be taken for the next one's."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    queues = []
    for _ in range(2):
        with checkpoints.queue_of_a_write():
            queues.append(filesystem_async._results_queue)
    assert all(type(one) is queue.Queue for one in queues) and queues[0] is not queues[1]
    assert filesystem_async._results_queue is None
