"""What we change in vLLM, in one place. Each: what upstream does, why we differ, versions, when to delete.

segment_names (vLLM 0.32, CPU only): under the external launcher the identifier of CPU shared memory is the last
part of "env://", so every job on a host maps /dev/shm/-tp:0-[0-1]-cpushm*: two jobs at once read each other's
activations, and a crashed one blocks the next. We put the job's prefix in front. Delete when vLLM derives the name
from the job; tests/dist/test_rollout_jobs.py then finds no name of ours to wrap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["segment_names"]


@contextmanager
def segment_names(prefix: str) -> Iterator[None]:
    """Names made inside start with `prefix`."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original = _CPUSHMDistributed.make_group_name

    def named(communicator: Any) -> str:
        return prefix + original(communicator).replace("/", "").lstrip(
            "-"
        )  # a slash inside a segment's name is refused

    _CPUSHMDistributed.make_group_name = staticmethod(named)
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(original)
