"""The Transport interface: messages between ranks, barriers and small collectives."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class Transport:
    """Moves messages between ranks. Every rank calls every method, in the same order. This base
    class is for a single process that trains and samples, without peers; other transports override
    all methods."""

    rank = 0
    world = 1

    def start(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        """Starts sending the flat buffers `outgoing[rank]` and filling `incoming[rank]`. Returns a
        function that waits until both are done."""
        assert not outgoing and not incoming, "a world of one has no peers"
        return lambda: None

    def barrier(self, what: str, *, patience: int = 1) -> None:
        """Blocks the host until every rank reaches `what`, for at most `patience` times the
        time-out of a collective. Raises CheckFailed naming the ranks that do not arrive in time."""

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum over all ranks, on every rank."""
        return values

    def gather(self, value: Any) -> list[Any]:
        """Returns a small control value of every rank, by rank; never used for weights."""
        return [value]

    def leave(self) -> None:
        """Closes the connections of a group across worlds, so that no peer waits for this rank."""
