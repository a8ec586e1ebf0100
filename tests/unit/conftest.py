"""Property tests: the same examples every time, and no deadline on a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("megarl", deadline=None, max_examples=15, derandomize=True)
settings.load_profile("megarl")
