"""How messages travel and how ranks agree."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class Transport:
    """Every rank calls every method, in the same order. This is the transport of a single process
    that trains and samples, without messages or peers; others override all of it."""

    rank = 0
    world = 1

    def start(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        """Starts sending the flat `outgoing[rank]` and filling `incoming[rank]`; returns a function
        that waits."""
        assert not outgoing and not incoming, "a world of one has no peers"
        return lambda: None

    def barrier(self, what: str, *, patience: int = 1) -> None:
        """Waits for every rank to reach `what`, on the host, `patience` times as long as for a
        collective. Raises CheckFailed naming the ranks that do not arrive in time."""

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum over all ranks, on every rank."""
        return values

    def gather(self, value: Any) -> list[Any]:
        """Returns a small control value of every rank, by rank; never used for weights."""
        return [value]

    def leave(self) -> None:
        """Ends the connections of a group across worlds, so that nobody waits for this rank."""
