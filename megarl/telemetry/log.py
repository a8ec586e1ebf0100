"""Records each step in metrics.jsonl, timeline.json, rollouts/step_<n>.jsonl and trackers, and shows progress.

    with telemetry.step(n) as record:       starts the step's clocks
        with telemetry.span("update")       times time/update, and adds a span to the timeline
        telemetry.add({...})                adds metrics, for example the peak memory of a phase
        record(rollout, update, sync, ...)  computes the other metrics and writes everything
    telemetry.evaluated(n, {...})           passes results on held-out problems, after n steps, to the trackers

Rank 0 writes. The other ranks use `Silent`, which has the same methods, so that the loop needs no `if rank == 0`.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from megarl.config.load import run_dir
from megarl.config.schema import Config
from megarl.roles import Record
from megarl.telemetry.gpus import open_gpus
from megarl.telemetry.metrics import (
    append_line,
    forget_steps,
    publish_metrics,
    rollout_metrics,
    staleness_metrics,
    update_metrics,
)
from megarl.telemetry.sample_files import SampleWriter
from megarl.telemetry.trackers import Trackers
from megarl.types import PublishReport, Rollout, ScoredBatch, StepReport

# time/<key> is the span of that name, or else that of the phase
TIMES = {
    "generate": "rollout",
    "reward": "",
    "logprobs": None,
    "update": "train",
    "save": None,
    "publish": "sync",
}

# metric, label, format
SHOWN = (
    ("reward/mean", "reward", "{:.3f}"),
    ("reward/accuracy/mean", "accuracy", "{:.3f}"),
    ("accuracy/sampled", "accuracy", "{:.3f}"),
    ("loss", "loss", "{:.4f}"),
    ("logprob_diff/max", "log-prob diff", "{:.1e}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
)


class Silent:
    """Discards everything; used on all ranks but 0."""

    def step(self, step: int) -> AbstractContextManager[Record]:
        return nullcontext(lambda rollout, update, sync, scored=None: None)

    def span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def add(self, metrics: Mapping[str, Any]) -> None: ...
    def evaluated(self, step: int, results: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class Timeline:
    """Nested spans as a Chrome trace, for chrome://tracing or Perfetto: a complete JSON array after every flush.
    `seconds` totals the spans of each name in a step."""

    def __init__(self, file: Path) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._events, self._separator = [], "\n"
        self._out = file.open("w", encoding="utf-8")
        self._out.write("[\n]")
        self._out.flush()
        self._origin = time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - begin
            self.seconds[name] += took
            start_us, took_us = round((begin - self._origin) * 1e6, 1), round(took * 1e6, 1)
            self._events.append(
                {"name": name, "ph": "X", "ts": start_us, "dur": took_us, "pid": 0, "tid": 0}
            )

    def flush(self) -> None:
        if not self._events:
            return
        self._out.seek(self._out.seek(0, 2) - len("\n]"))  # overwrite the closing bracket
        self._out.write(self._separator + ",\n".join(map(json.dumps, self._events)) + "\n]")
        self._out.flush()
        self._events, self._separator = [], ",\n"

    def close(self) -> None:
        self.flush()
        self._out.close()


def brief(metrics: Mapping[str, Any]) -> str:
    """The main metrics on one line: `reward 0.412  log-prob diff 2.1e-06  tokens/s 1,830`."""
    omitted = "loss" if metrics.get("reward/mean") is not None else None
    values = [(name, style, metrics.get(key)) for key, name, style in SHOWN if key != omitted]
    return "  ".join(
        f"{name} {style.format(value)}"
        for name, style, value in values
        if isinstance(value, int | float)
    )


class ProgressDisplay:
    """Shows each finished step, as a bar or a line, and the remaining time, estimated from recent steps."""

    def __init__(self, *, steps: int, start: int, name: str, interactive: bool) -> None:
        self._steps, self._start, self._name = steps, start, name
        self._pace_s: float | None = None  # of a step, smoothed
        self._last = time.monotonic()
        self._bar: Progress | None = None
        if interactive:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(24),
                MofNCompleteColumn(),
            )
            self._bar = Progress(
                *columns, TextColumn("{task.fields[text]}"), console=Console(), transient=False
            )
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
            print(
                f"{self._name} {step + 1:>{len(str(self._steps))}}/{self._steps}  {text}",
                flush=True,
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class Telemetry:
    """roles.Telemetry of rank 0. `facts` (world_size, layout) are part of every line of metrics.jsonl."""

    def __init__(
        self,
        config: Config,
        *,
        start: int,
        interactive: bool,
        facts: Mapping[str, Any],
        gpu_uuids: Sequence[str] = (),
    ) -> None:
        folder, settings = run_dir(config), config.telemetry
        self._facts = dict(facts)
        self._samples = SampleWriter(
            folder / "rollouts", settings.rollouts, seed=config.run.seed, start=start
        )
        self._file = folder / "metrics.jsonl"
        forget_steps(self._file, start)
        self._timeline = Timeline(folder / "timeline.json")
        self.span = self._timeline.span
        self._trackers = Trackers(config, start=start)
        self._gpus = open_gpus(gpu_uuids)
        self._progress = ProgressDisplay(
            steps=config.train.steps, start=start, name=folder.name, interactive=interactive
        )
        self._added: dict[str, Any] = {}
        self._began = time.perf_counter()

    @contextmanager
    def step(self, step: int) -> Iterator[Record]:
        self._timeline.seconds.clear()
        self._began = time.perf_counter()
        with self._timeline.span(f"step {step}"):
            yield partial(self._write, step)
        self._timeline.flush()

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds peaks to the current step, or to the first one before it begins; the largest of a name counts."""
        self._added |= {
            name: max(value, self._added.get(name, value)) for name, value in metrics.items()
        }

    def evaluated(self, step: int, results: Mapping[str, Any]) -> None:
        """Passes results on held-out problems to the trackers; their file is eval.jsonl."""
        self._trackers.log(
            step, {f"eval/{name}": value for name, value in results.items()}, is_complete=False
        )

    def _write(
        self,
        step: int,
        rollout: Rollout | None,
        update: StepReport,
        sync: PublishReport | None,
        scored: ScoredBatch | None = None,
    ) -> None:
        took, seconds = time.perf_counter() - self._began, self._timeline.seconds
        groups = rollout.groups if rollout else ()
        sampled = sum(int(sample.trainable.sum()) for group in groups for sample in group.samples)
        metrics = {
            "step": step,
            **self._facts,
            **(rollout_metrics(rollout) if rollout else {}),
            **staleness_metrics(groups, step),
            **update_metrics(update),
            "time/step": took,
            **{
                f"time/{key}": seconds[x]
                for key, phase in TIMES.items()
                for x in (phase, key)
                if x in seconds
            },
            **(publish_metrics(sync) if sync else {}),
            **({"tokens_per_second": sampled / took} if sampled else {}),
            **self._added,
            **(self._gpus.take() if self._gpus else {}),
        }
        self._added.clear()
        self._timeline.flush()  # a step that is in metrics.jsonl is in the timeline too, whenever the run is killed
        append_line(self._file, metrics)
        self._samples.write(step, groups, scored)
        self._trackers.log(step, metrics)
        self._progress.show(step, metrics)

    def close(self) -> None:
        self._progress.close()
        self._timeline.close()
        if self._gpus:
            self._gpus.close()
        self._trackers.close()
