"""How messages travel and how ranks agree: one contract, a file for each implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Transport"]


class Transport(Protocol):
    """Every rank calls every method, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def start(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Callable[[], None]:
        """Send the flat `outgoing[rank]` and fill the flat `incoming[rank]`; returns what waits for all of it."""
        ...

    def barrier(self, what: str) -> None:
        """Wait for every rank to reach `what`. Raises CheckFailed naming those that do not, in time."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, on each of them."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """A small control value of every rank, by rank. Never weights."""
        ...
