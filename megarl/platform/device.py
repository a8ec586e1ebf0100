"""Selects the device of this process; allocates host memory and reads memory statistics."""

import ctypes
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor

from megarl.platform.env import get_env

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # config.train.dtype -> torch dtype
# Options of glibc's mallopt for freed memory to be kept for later tensors: one arena, no mmap, grow
# the heap by 64 MiB, trim it above 2 GiB. If memory is returned to the system, the next step faults
# every page in again. Peaks of resident memory then include memory that earlier phases have freed.
KEEP_FREED = {
    -8: 1,  # M_ARENA_MAX
    -4: 0,  # M_MMAP_MAX
    -2: 1 << 26,  # M_TOP_PAD
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD
}
# pinned blocks above 64 MB are not rounded up: torch would allocate 64 GiB for 43 GB
PINNED = "pinned_max_round_threshold_mb:64"


def pick_device(local_rank: int) -> torch.device:
    """Selects the GPU of this local rank, or the CPU if torch finds none.

    Raises ValueError if the node has too few GPUs.
    """
    if not torch.cuda.is_available():
        set_malloc(KEEP_FREED)
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU: this node has {torch.cuda.device_count()}; "
            "start at most one process per GPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    configured = get_env("PYTORCH_ALLOC_CONF") or ""
    try:
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (configured, PINNED))))
    except (RuntimeError, ValueError):  # torch 2.11 rejects it, but would pass it on to vLLM
        torch._C._accelerator_setAllocatorSettings(configured)
    return device


def set_malloc(options: Mapping[int, int]) -> None:
    """Sets options of malloc, {number in malloc.h: value}. Does nothing without glibc."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for option, value in options.items():
            mallopt(option, value)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to the device without waiting for it; copies to a GPU use pinned memory."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def gpu_name(device: torch.device) -> str:
    """Returns the name that the driver reports for a GPU; "" on a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def gpu_uuids(count: int) -> list[str]:
    """Returns the UUIDs, without the prefix `GPU-`, of the first `count` visible GPUs."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]


def host_bytes(size: int, device: torch.device) -> Tensor:
    """Returns an uninitialised host tensor [size] uint8, pinned if `device` is a GPU."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")


def device_bytes(device: torch.device) -> tuple[int, int] | None:
    """Returns (free, total) bytes of a GPU, None on a CPU. Memory cached by torch is not free."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else None


def free_host_bytes() -> int:
    """Returns the bytes that processes can allocate without swapping."""
    return psutil.virtual_memory().available


def reset_peak(device: torch.device) -> None:
    """Resets the peak that `peak_gb` returns."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(
        OSError
    ):  # not Linux, or not permitted: peak_gb then returns the peak since the process started
        Path("/proc/self/clear_refs").write_text("5")


def peak_gb(device: torch.device) -> float:
    """Returns the peak memory in GB (1e9 bytes), or NaN if unknown: on a GPU, memory allocated by
    torch; on a CPU, resident memory of this process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e9
    return math.nan
