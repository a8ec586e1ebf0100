"""Patches that vLLM needs: PATCHES. `applied` while an engine starts in a trainer's process,
`install_in_worker` in the worker processes of an engine of its own."""

import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.patches.patch import Patch, replaced

_row = partial(Patch, versions="0.32")
_TESTS = "unit/patches/test_vllm.py"
_LAYERS = "vllm.model_executor.layers.fused_moe"
_COMMUNICATOR = (
    "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
)


def _segment_name(original: Any, communicator: Any, *, prefix: str = "") -> str:
    # segment names cannot contain slashes
    return prefix + original(communicator).replace("/", "").lstrip("-")


def _init_without_finalizer(original: Any, client: Any, *args: Any, **kwargs: Any) -> None:
    original(client, *args, **kwargs)
    client._finalizer.detach()


def _apply_local_experts(original: Any, experts: Any, *args: Any, **kwargs: Any) -> None:
    own = kwargs.pop("expert_map", None)
    if own is not None:
        ids = own[kwargs["topk_ids"].long()]
        kwargs["topk_weights"] = kwargs["topk_weights"].where(ids >= 0, 0)
        kwargs["topk_ids"] = ids.clamp(min=0).to(kwargs["topk_ids"].dtype)
    original(experts, *args, expert_map=None, **kwargs)


def _all_gatherv(
    communicator: Any,
    rows: Tensor | list[Tensor],
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> Tensor | list[Tensor]:
    assert dim == 0
    if isinstance(rows, Tensor):
        return _gather_rows(rows, sizes, communicator.device_group)
    return [_gather_rows(each, sizes, communicator.device_group) for each in rows]


def _gather_rows(rows: Tensor, sizes: Sequence[int] | None, group: Any) -> Tensor:
    sizes = sizes or [len(rows)] * dist.get_world_size(group)
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatterv(
    communicator: Any, rows: Tensor, dim: int = -1, sizes: Sequence[int] | None = None
) -> Tensor:
    assert dim == 0
    total = rows.clone()
    dist.all_reduce(total, group=communicator.device_group)
    ranks: int = communicator.world_size
    sizes = sizes or [len(rows) // ranks] * ranks
    return total.split(list(sizes))[communicator.rank_in_group]


def _store_on_host(
    original: Any, host: str, port: int, listen_socket: Any = None, **options: Any
) -> Any:
    if listen_socket is None and options.get("is_master"):
        listen_socket = socket.create_server((host, port))
        port = listen_socket.getsockname()[1]
    return original(host, port, listen_socket=listen_socket, **options)


SEGMENT_NAME = _row(
    "vllm.distributed.device_communicators.cpu_communicator._CPUSHMDistributed.make_group_name",
    _segment_name,
    "under the external launcher, derives the name of CPU shared memory from 'env://'; all "
    "jobs on a host would map /dev/shm/-tp:0-[0-1]-cpushm*, read each other's activations, "
    "and be blocked by a crashed job; the prefix is the job's",
    calls_original=True,
    delete_when="vLLM derives the name from the job",
    test=f"{_TESTS}::test_segments_are_not_named_after_the_job",
)
FP8_LINEAR = _row(
    "vllm.model_executor.kernels.linear.scaled_mm.cpu.CPUFp8BlockScaledMMKernel.is_supported",
    lambda *_: (True, None),
    "allows FP8 blocks with bf16 activations only where the CPU has AMX; the library it loads"
    " for AVX-512 with bf16 has the kernel too, with the same results",
    delete_when="`is_supported` allows a CPU without AMX",
    test="dist/test_fp8_rollout.py::test_vllm_still_needs_the_patch",
)
FP8_EXPERTS = _row(
    f"{_LAYERS}.experts.cpu_moe.CPUExpertsFp8._supports_current_device",
    lambda: True,
    "as FP8_LINEAR, for experts",
    delete_when="`_supports_current_device` allows a CPU without AMX",
    test=f"{_TESTS}::test_fp8_experts_need_amx",
)
MOE_WITHOUT_LORA = _row(
    f"{_LAYERS}.unquantized_fused_moe_method.select_unquantized_moe_backend",
    lambda original, moe_config: original(replace(moe_config, is_lora_enabled=False)),
    "with LoRA enabled, runs experts on Triton, adapted or not; a CPU has no Triton, and "
    "megarl adapts no experts",
    calls_original=True,
    delete_when="vLLM asks whether experts are adapted",
    test=f"{_TESTS}::test_lora_selects_triton_for_all_experts",
)
FINALIZER = _row(
    "vllm.v1.engine.core_client.InprocClient.__init__",
    _init_without_finalizer,
    "destroys the default process group when the client is collected, and at exit; the group "
    "is also the trainer's",
    calls_original=True,
    delete_when="the engine leaves a process group that it did not create",
    test=f"{_TESTS}::test_a_finalizer_shuts_the_engine_down",
)
LOCAL_EXPERTS, LOCAL_FP8_EXPERTS = (
    _row(
        f"{_LAYERS}.experts.cpu_moe.{name}.apply",
        _apply_local_experts,
        "takes global numbers of experts for numbers of the rank's own; with expert parallelism, "
        "`expert_map` has the rank's own, and -1 for others",
        calls_original=True,
        delete_when="`apply` reads `expert_map`",
        test=f"{_TESTS}::test_experts_on_a_cpu_ignore_the_expert_map",
    )
    for name in ("CPUUnquantizedExperts", "CPUExpertsFp8")
)
GATHER_ROWS = _row(
    f"{_COMMUNICATOR}.all_gatherv",
    _all_gatherv,
    "gathers the tokens of all data ranks for their experts, and is not implemented on a CPU",
    delete_when="CpuCommunicator has `all_gatherv`",
    test=f"{_TESTS}::test_a_cpu_cannot_gather_rows_of_data_ranks",
)
SCATTER_ROWS = _row(
    f"{_COMMUNICATOR}.reduce_scatterv",
    _reduce_scatterv,
    "adds the experts' outputs and returns each data rank its tokens, as GATHER_ROWS",
    delete_when="CpuCommunicator has `reduce_scatterv`",
    test=f"{_TESTS}::test_a_cpu_cannot_gather_rows_of_data_ranks",
)
STORE = _row(
    "vllm.distributed.parallel_state.create_tcp_store",
    _store_on_host,
    "serves the store of a data-parallel engine's workers, which has no authentication, on all "
    "interfaces instead of the host's address only",
    calls_original=True,
    delete_when="vLLM binds the store's server to its host",
    test=f"{_TESTS}::test_a_store_of_workers_listens_on_all_interfaces",
)
EXPERT_PARALLEL = (LOCAL_EXPERTS, LOCAL_FP8_EXPERTS, GATHER_ROWS, SCATTER_ROWS)
PATCHES = (
    SEGMENT_NAME,
    FP8_LINEAR,
    FP8_EXPERTS,
    MOE_WITHOUT_LORA,
    FINALIZER,
    *EXPERT_PARALLEL,
    STORE,
)
_INSTALLED = ExitStack()


def applied(prefix: str) -> AbstractContextManager[None]:
    """Patches vLLM within the context; the names of its shared-memory segments get `prefix`."""
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    needed = [replace(SEGMENT_NAME, replacement=partial(_segment_name, prefix=prefix)), FINALIZER]
    if current_platform.is_cpu() and _custom_ops._supports_cpu_fp8_w8a16:
        needed += [FP8_LINEAR, FP8_EXPERTS]
    if not torch.cuda.is_available():
        needed.append(MOE_WITHOUT_LORA)
    return replaced(needed)


def install_expert_parallel() -> None:
    """Patches what expert- and data-parallel engines need on a CPU, for the rest of the process."""
    if not torch.cuda.is_available():
        _INSTALLED.enter_context(replaced(EXPERT_PARALLEL))


def install_in_worker() -> None:
    """Patches a worker of an engine in processes of its own, for the rest of the process."""
    _INSTALLED.enter_context(replaced([STORE]))
    install_expert_parallel()
