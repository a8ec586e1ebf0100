"""A stand-in for engines: roles.Sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.types import Sample


@dataclass
class AtOnce:
    """Everything that was submitted is finished in the next `poll`."""

    draw: Callable[[Any], Sample]
    waiting: list[Any] = field(default_factory=list)

    def submit(self, requests: Sequence[Any]) -> None:
        self.waiting += requests

    def poll(self, timeout_s: float | None = None) -> list[Sample]:
        requests, self.waiting = self.waiting, []
        return [self.draw(request) for request in requests]

    def running(self) -> int:
        return len(self.waiting)
