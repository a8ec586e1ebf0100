"""How a round of flat buckets travels, and how ranks agree: one small contract, one file per way."""

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
        """Send `outgoing[rank]` and fill `incoming[rank]`, both flat; call the result to wait for all of it."""
        ...

    def barrier(self, what: str) -> None:
        """Every rank has come to `what`. Raises CheckFailed naming those that have not, in time."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, on each of them."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """The largest over all ranks, element by element, on each of them."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Everybody's small control value, by rank. Never weights."""
        ...
