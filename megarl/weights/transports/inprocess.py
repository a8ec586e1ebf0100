"""The transport of a single process that trains and samples: no messages, no peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class InProcess:
    rank = 0
    world = 1

    def start(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Callable[[], None]:
        assert not outgoing and not incoming, "a world of one has no peers"
        return lambda: None

    def barrier(self, what: str, *, patience: int = 1) -> None: ...

    def sum(self, values: Tensor) -> Tensor:
        return values

    def gather(self, value: Any) -> list[Any]:
        return [value]
