"""Which phase this process is in: written by the phases, read by whoever reports a failure, so that a time-out says
what each rank was doing. No torch, as the launcher reads it too."""

from __future__ import annotations

__all__ = ["current", "enter"]

_now = ["start-up"]  # one process runs one loop


def enter(phase: str) -> None:
    _now[0] = phase


def current() -> str:
    """The phase this process is in, or was in when an exception left it."""
    return _now[0]
