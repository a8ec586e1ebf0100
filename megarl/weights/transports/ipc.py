"""Buckets between processes of one node through CUDA IPC: the receiver copies out of the sender's own memory.

    sender: pack -> staging buffer, whose handle peers opened once --"round n is there"--> receiver: copy, synchronise
    receiver --"round n is read"--> sender may reuse that buffer

Opening a handle costs more than copying a bucket, so each pair of ranks has two staging buffers that live as long as
the transport, and handles are sent once. A buffer is not written again before its reader's device has finished with it.
Words go over a gloo group; sums, and whatever crosses nodes, over torch.distributed as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.weights.transports.collective import TIMEOUT_S, Collective

__all__ = ["Ipc"]

DEPTH = 2  # rounds in flight


class Ipc:
    """All ranks of `group` are processes of this node, on one GPU or on GPUs that reach each other."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self._together = Collective(group, timeout_s=timeout_s)
        self.rank, self.world = self._together.rank, self._together.world
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)  # pyright: ignore[reportArgumentType]
        self._words: Any = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._round = 0
        self._staging: dict[tuple[int, int], Tensor] = {}  # (peer, slot) -> ours to write
        self._opened: dict[tuple[int, int], tuple[Any, Tensor]] = {}  # (peer, slot) -> its handle, its memory

    def start(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Callable[[], None]:
        slot = self._round % DEPTH
        self._round += 1
        handles: dict[int, Any] = {}
        for peer, flat in outgoing.items():
            data = flat.view(torch.uint8)
            staging = self._staging.get((peer, slot))
            if staging is None or staging.numel() < data.numel():
                staging = self._staging[peer, slot] = torch.empty_like(data)
            staging[: data.numel()].copy_(data)
            handles[peer] = staging.untyped_storage()._share_cuda_()
        torch.cuda.current_stream().synchronize()  # what peers are told is there, is there
        theirs: list[dict[int, Any]] = [{}] * self.world
        dist.all_gather_object(theirs, handles, group=self._words)
        copied = [False]

        def wait() -> None:
            if copied[0]:
                return
            copied[0] = True
            for peer, flat in sorted(incoming.items()):
                source = self._open(peer, slot, theirs[peer][self.rank])
                data = flat.view(torch.uint8)
                data.copy_(source[: data.numel()])
            torch.cuda.current_stream().synchronize()
            dist.barrier(group=self._words)  # all have read: staging may be written again

        return wait

    def _open(self, peer: int, slot: int, handle: Any) -> Tensor:
        known = self._opened.get((peer, slot))
        if known is None or known[0][1:4] != handle[1:4]:  # the memory's handle, its size, where in it
            storage = torch.UntypedStorage._new_shared_cuda(*handle)
            memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore
            known = self._opened[peer, slot] = handle, memory
        return known[1]

    def barrier(self, what: str) -> None:
        self._together.barrier(what)

    def sum(self, values: Tensor) -> Tensor:
        return self._together.sum(values)

    def max(self, values: Tensor) -> Tensor:
        return self._together.max(values)

    def gather(self, value: Any) -> list[Any]:
        return self._together.gather(value)
