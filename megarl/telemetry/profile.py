"""Profiles some steps of a rank: telemetry.profile --torch.profiler--> profile_rank<r>.json."""

from pathlib import Path
from typing import Any


def open_profiler(file: Path, first: int, last: int, start: int) -> Any:
    """Starts a profiler of the steps `first` to `last`, of a run that begins at step `start`.

    `step` must be called after each step. A Chrome trace is written to `file` after the last step,
    or by `stop`.
    """
    from torch.profiler import ProfilerAction, profile

    def action(index: int) -> ProfilerAction:
        step = start + index
        if step == last:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.RECORD if first <= step < last else ProfilerAction.NONE

    profiler = profile(
        schedule=action, on_trace_ready=lambda done: done.export_chrome_trace(str(file))
    )
    profiler.start()
    return profiler
