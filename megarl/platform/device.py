"""Which device this process computes on, and which backend its collectives use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["DTYPES", "Device", "pick_device"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # config.train.dtype


@dataclass(frozen=True, slots=True)
class Device:
    torch: torch.device
    backend: Literal["nccl", "gloo"]

    @property
    def is_cuda(self) -> bool:
        return self.torch.type == "cuda"


def pick_device(local_rank: int = 0) -> Device:
    """The GPU of this local rank, made current; the CPU with gloo where torch sees no GPU.

    Raises ValueError when there are more local ranks than GPUs.
    """
    if not torch.cuda.is_available():
        return Device(torch.device("cpu"), "gloo")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU, this node has {torch.cuda.device_count()}; "
            "start at most one process per GPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return Device(device, "nccl")
