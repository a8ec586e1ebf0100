"""A world of ranks that are threads of one process, for weight syncs between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megarl.weights.sync.transports import Transport


class Threaded(Transport):
    """A transport between threads of this process; `world_of` makes those of a world."""

    def __init__(self, rank: int, slots: list[Any], meeting: threading.Barrier) -> None:
        self.rank = rank
        self.world = len(slots)
        self._slots = slots  # a value of every rank
        self._meeting = meeting

    def gather(self, value: Any) -> list[Any]:
        self._meeting.wait()
        self._slots[self.rank] = value
        self._meeting.wait()
        return list(self._slots)

    def barrier(self, what: str, *, patience: int = 1) -> None:
        self.gather(None)

    def sum(self, values: Tensor) -> Tensor:
        return torch.stack(self.gather(values)).sum(0)

    def start(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        sent = self.gather(outgoing)

        def wait() -> None:
            for sender, flat in incoming.items():
                flat.copy_(sent[sender][self.rank])

        return wait

    def leave(self) -> None:
        self._meeting.abort()


def world_of(size: int) -> list[Threaded]:
    slots: list[Any] = [None] * size
    meeting = threading.Barrier(size, timeout=120)
    return [Threaded(rank, slots, meeting) for rank in range(size)]


def on_all_ranks(world: Sequence[Threaded], collective: Callable[[Threaded], Any]) -> list[Any]:
    """Calls `collective` in a thread for each rank; raises the error of the one that failed first."""

    def run(transport: Threaded) -> Any:
        try:
            return collective(transport)
        except BaseException:
            transport.leave()
            raise

    with ThreadPoolExecutor(len(world)) as threads:
        calls = [threads.submit(run, transport) for transport in world]
    errors = [error for call in calls if (error := call.exception())]
    first = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (first or errors)[0]
    return [call.result() for call in calls]
