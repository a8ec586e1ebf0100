"""Progress of a run: a bar on a terminal, otherwise a line per step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

# metric, label, format
SHOWN = (
    ("reward/mean", "reward", "{:.3f}"),
    ("reward/accuracy/mean", "accuracy", "{:.3f}"),
    ("accuracy/sampled", "accuracy", "{:.3f}"),
    ("loss", "loss", "{:.4f}"),
    ("logprob_diff/max", "log-prob diff", "{:.1e}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
)


def brief(metrics: Mapping[str, Any]) -> str:
    """The main metrics on one line: `reward 0.412  log-prob diff 2.1e-06  tokens/s 1,830`."""
    has_reward = metrics.get("reward/mean") is not None
    parts = []
    for key, name, style in SHOWN:
        value = metrics.get(key)
        if isinstance(value, int | float) and not (name == "loss" and has_reward):
            parts.append(f"{name} {style.format(value)}")
    return "  ".join(parts)


class ProgressDisplay:
    """Shows each finished step, and the remaining time, estimated from recent steps."""

    def __init__(self, *, steps: int, start: int, name: str, interactive: bool) -> None:
        self._steps, self._start, self._name = steps, start, name
        self._pace_s: float | None = None  # of a step, smoothed
        self._last = time.monotonic()
        self._bar: Progress | None = None
        if interactive:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[text]}"), console=Console(), transient=False)
            self._task = self._bar.add_task(name, total=steps, completed=start, text="starting")
            self._bar.start()

    def show(self, step: int, metrics: Mapping[str, Any]) -> None:
        now = time.monotonic()
        took, self._last = now - self._last, now
        if step > self._start:  # the first step includes warm-up
            self._pace_s = took if self._pace_s is None else 0.9 * self._pace_s + 0.1 * took
        text = brief(metrics)
        if self._pace_s is not None and (left := self._steps - step - 1):
            minutes, seconds = divmod(round(self._pace_s * left), 60)
            text += f"  {minutes}m{seconds:02d}s left" if minutes else f"  {seconds}s left"
        if self._bar is not None:
            self._bar.update(self._task, completed=step + 1, text=text)
        else:
            print(f"{self._name} {step + 1:>{len(str(self._steps))}}/{self._steps}  {text}", flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
