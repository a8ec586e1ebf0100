"""Patches to vLLM. Each entry states what upstream does, why megarl differs, the versions, and when to delete it.

segment_names (vLLM 0.32, CPU only): under the external launcher the name of CPU shared memory derives from "env://", so
every job on a host maps /dev/shm/-tp:0-[0-1]-cpushm*. Concurrent jobs read each other's activations, and a crashed job
blocks the next. The patch adds the job's prefix. Delete it when vLLM derives the name from the job;
tests/dist/test_launch.py runs two jobs side by side.

fp8_kernels (vLLM 0.32, CPU only): vLLM allows its FP8 kernels (bf16 activations, FP8 blocks) only where the CPU has
AMX, but the library that it loads for AVX512 with bf16 has them too, and they compute the same there. Delete it when
`is_supported` allows that; tests/dist/test_fp8_rollout.py fails then.

moe_without_lora (vLLM 0.32, CPU only): with LoRA enabled, vLLM runs experts on Triton, which a CPU lacks, even if none
of them is adapted. The patch selects their kernel as without LoRA. Delete it when vLLM asks whether experts are
adapted; tests/e2e/test_lora.py runs adapters beside experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch


def segment_names(prefix: str) -> AbstractContextManager[Any]:
    """Within the context, the shared-memory names that vLLM creates start with `prefix`."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    name = "make_group_name"
    original = getattr(_CPUSHMDistributed, name)

    def named(communicator: Any) -> str:
        return prefix + original(communicator).replace("/", "").lstrip(
            "-"
        )  # segment names cannot contain slashes

    return patch.object(_CPUSHMDistributed, name, staticmethod(named))


@contextmanager
def fp8_kernels() -> Iterator[None]:
    """Within the context, vLLM chooses its FP8 kernels on every CPU that has them."""
    from vllm import _custom_ops
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() and _custom_ops._supports_cpu_fp8_w8a16):
        yield
        return
    linear = patch.object(
        CPUFp8BlockScaledMMKernel, "is_supported", staticmethod(lambda *_: (True, None))
    )
    experts = patch.object(CPUExpertsFp8, "_supports_current_device", staticmethod(lambda: True))
    with linear, experts:
        yield


def moe_without_lora() -> AbstractContextManager[Any]:
    """Within the context, vLLM chooses the kernel of experts as if LoRA were off; on a CPU only."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method

    if torch.cuda.is_available():
        return nullcontext()
    name = "select_unquantized_moe_backend"
    original = getattr(unquantized_fused_moe_method, name)

    def select(moe_config: Any) -> Any:
        return original(replace(moe_config, is_lora_enabled=False))

    return patch.object(unquantized_fused_moe_method, name, select)
