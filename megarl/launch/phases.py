"""Who owns the device now: rollout, train or sync. On CPU both stay resident: phases are only timed.

`current()` is read by whoever reports a failure: a time-out then says what each rank was doing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

__all__ = ["TimedPhases", "current"]

_now = ["start-up"]  # one process runs one loop; written by TimedPhases only


def current() -> str:
    """The phase this process is in, or was in when an exception left it."""
    return _now[0]


class TimedPhases:
    """roles.Phases for a device that both sides share. `span` times a named stretch (Telemetry.span)."""

    def __init__(self, span: Callable[[str], AbstractContextManager[None]]) -> None:
        self._span = span

    def rollout(self) -> AbstractContextManager[None]:
        return self._enter("rollout")

    def train(self) -> AbstractContextManager[None]:
        return self._enter("train")

    def sync(self) -> AbstractContextManager[None]:
        return self._enter("sync")

    @contextmanager
    def _enter(self, name: str) -> Iterator[None]:
        _now[0] = name
        with self._span(name):
            yield
        _now[0] = f"after {name}"  # not reached when an exception leaves: then `current` names the phase itself
