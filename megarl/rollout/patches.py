"""Patches to vLLM. Each entry states what upstream does, why megarl differs, the versions, and when to delete it.

segment_names (vLLM 0.32, CPU only): under the external launcher the name of CPU shared memory derives from "env://", so
every job on a host maps /dev/shm/-tp:0-[0-1]-cpushm*. Concurrent jobs read each other's activations, and a crashed job
blocks the next. The patch adds the job's prefix. Delete it when vLLM derives the name from the job;
tests/dist/test_launch.py runs two jobs side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def segment_names(prefix: str) -> Iterator[None]:
    """Within the context, the shared-memory names that vLLM creates start with `prefix`."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original = _CPUSHMDistributed.make_group_name

    def named(communicator: Any) -> str:
        return prefix + original(communicator).replace("/", "").lstrip("-")  # segment names cannot contain slashes

    _CPUSHMDistributed.make_group_name = staticmethod(named)
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(original)
