"""The phase a rank is in, so that the record of a failure says what the rank was doing. No torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CurrentPhase"]


@dataclass
class CurrentPhase:
    """Set by the phases of a run, read when an exception ends it."""

    name: str = "start-up"
