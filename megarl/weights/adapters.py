"""Publishes a policy of frozen weights and adapters: the weights in the first sync, the adapters in every one.

first   weights --Publisher--> engine, unproven until its adapters are there
every   adapters --Publisher, with the probe--> engine
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from megarl.types import PublishReport
from megarl.weights.publish import Publisher


class AdapterPublisher:
    """roles.Weights. Each publisher has its own plan, checksums and placement check."""

    def __init__(self, weights: Publisher, adapters: Publisher) -> None:
        self.weights, self.adapters = weights, adapters
        self._has_weights = False

    @property
    def span(self) -> Callable[[str], AbstractContextManager[Any]]:
        return self.adapters.span

    @span.setter
    def span(self, span: Callable[[str], AbstractContextManager[Any]]) -> None:
        self.weights.span = self.adapters.span = span

    def publish(self, *, version: int) -> PublishReport:
        """Raises CheckFailed, on all ranks, as Publisher.publish does."""
        first = None if self._has_weights else self.weights.publish(version=version)
        self._has_weights = True
        report = self.adapters.publish(version=version)
        if first is None:
            return report
        sums = {
            name: getattr(first, name) + getattr(report, name)
            for name in ("num_tensors", "bytes_kept", "bytes_received", "seconds")
        }
        return replace(report, **sums)
