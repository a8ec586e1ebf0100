"""Patches to vLLM. Each entry states what upstream does, why megarl differs, the versions, and when to delete it.

segment_names (vLLM 0.32, CPU only): under the external launcher the name of CPU shared memory derives from "env://", so
every job on a host maps /dev/shm/-tp:0-[0-1]-cpushm*. Concurrent jobs read each other's activations, and a crashed job
blocks the next. The patch adds the job's prefix. Delete it when vLLM derives the name from the job;
tests/dist/test_launch.py runs two jobs side by side.

moe_without_lora (vLLM 0.32, CPU only): with LoRA enabled, experts run on Triton, which a CPU lacks, even if none of
them is adapted. The patch selects their kernel as without LoRA. Delete it when vLLM asks whether experts are adapted;
tests/dist/test_lora.py runs adapters beside experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch


@contextmanager
def applied(prefix: str) -> Iterator[None]:
    """Within the context, the shared-memory names that vLLM creates start with `prefix`, and both patches apply."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as experts

    make_name, select = _CPUSHMDistributed.make_group_name, experts.select_unquantized_moe_backend

    def named(communicator: Any) -> str:
        return prefix + make_name(communicator).replace("/", "").lstrip("-")  # segment names cannot contain slashes

    _CPUSHMDistributed.make_group_name = staticmethod(named)
    if not torch.cuda.is_available():
        experts.select_unquantized_moe_backend = lambda moe_config: select(replace(moe_config, is_lora_enabled=False))
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(make_name)
        experts.select_unquantized_moe_backend = select
