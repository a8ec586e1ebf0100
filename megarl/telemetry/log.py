"""Records each step in metrics.jsonl, timeline.json, rollouts/step_<n>.jsonl and trackers, and
shows progress.

    with telemetry.step(n) as record:       starts the timers of the step
        with telemetry.span("update")       measures time/update, and adds a span to the timeline
        telemetry.add({...})                adds metrics, for example the peak memory of a phase
        record(rollout, update, sync, ...)  computes the other metrics and writes everything
    telemetry.evaluated(n, {...})           sends evaluation results after n steps to the trackers

Only rank 0 writes metrics. Other ranks use `NodeTelemetry`, which has the same methods, so the
loop needs no `if rank == 0`.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from megarl import roles
from megarl.config.schema import Config
from megarl.telemetry.gpus import GpuMonitor, over_nodes
from megarl.telemetry.metrics import (
    append_line,
    forget_steps,
    publish_metrics,
    rollout_metrics,
    speed_metrics,
    staleness_metrics,
    update_metrics,
)
from megarl.telemetry.sample_files import SampleWriter
from megarl.telemetry.trackers import Trackers
from megarl.types import PublishReport, Rollout, ScoredBatch, StepReport

# span -> suffix of its metric time/<suffix>; if a phase and a span within it have the same suffix,
# the span's time is recorded
TIMES = """
    rollout generate
    generate generate
    reward reward
    logprobs logprobs
    train update
    update update
    save save
    sync publish
    publish publish
"""

PACE_S = 86400.0  # the remaining time is estimated from the steps of this many seconds
MAX_BYTES = 32 << 20  # maximum size of timeline.json: about 300,000 spans

# metric, format, label
SHOWN = """
    reward/mean            {:.3f}   reward
    reward/accuracy/mean   {:.3f}   accuracy
    accuracy/sampled       {:.3f}   accuracy
    loss                   {:.4f}   loss
    rewards/margin         {:.4f}   margin
    logprob_diff/max       {:.1e}   log-prob diff
    tokens_per_second      {:,.0f}  tokens/s
"""


def _rows(table: str) -> Iterator[list[str]]:
    return (line.split(maxsplit=2) for line in table.strip().splitlines())


class Timeline:
    """Writes nested spans as a Chrome trace, for chrome://tracing or Perfetto.

    The file is a complete JSON array after every flush; the end of the outermost span flushes it.
    Beyond MAX_BYTES, it is renamed to timeline_before.json and a new file is begun. Times are those
    of the system's clock, so that the files of several nodes fit together. `seconds` is the total
    time per span name in the current step.
    """

    def __init__(self, file: Path, node: int = 0) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._events = []
        self._open = 0  # spans that have not ended
        self._file = file
        self._node = node
        self._origin = time.perf_counter() - time.time()
        self._begin()

    def _begin(self) -> None:
        self._separator = "\n"
        self._out = self._file.open("w", encoding="utf-8")
        self._out.write("[\n]")
        self._out.flush()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self._open += 1
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._open -= 1
            took = time.perf_counter() - begin
            self.seconds[name] += took
            self._events.append(
                {
                    "name": name,
                    "ph": "X",
                    "ts": round((begin - self._origin) * 1e6, 1),
                    "dur": round(took * 1e6, 1),
                    "pid": self._node,
                    "tid": 0,
                }
            )
            if not self._open:
                self.flush()

    def flush(self) -> None:
        if not self._events:
            return
        self._out.seek(self._out.seek(0, 2) - len("\n]"))  # overwrite the closing bracket
        self._out.write(self._separator + ",\n".join(map(json.dumps, self._events)) + "\n]")
        self._out.flush()
        self._events = []
        self._separator = ",\n"
        if self._out.tell() > MAX_BYTES:
            self._out.close()
            self._file.replace(self._file.with_stem(f"{self._file.stem}_before"))
            self._begin()

    def close(self) -> None:
        self.flush()
        self._out.close()


class NodeTelemetry(roles.Telemetry):
    """Records no metrics; used on all ranks except rank 0.

    On the first rank of a node, it records the node's timeline and passes the metrics of its GPUs
    to rank 0. `gather` returns a value of every rank.
    """

    def __init__(
        self,
        timeline: Timeline | None = None,
        profiler: Any = None,  # see profile.py
        gpus: GpuMonitor | None = None,
        gather: Callable[[roles.Values], Sequence[roles.Values]] = lambda metrics: [metrics],
    ) -> None:
        self._timeline = timeline
        self._profiler = profiler
        self._gpus = gpus
        self._gather = gather

    @contextmanager
    def step(self, step: int) -> Iterator[roles.Record]:
        with self.span(f"step {step}"):
            yield self._record
        if self._profiler:
            self._profiler.step()

    def span(self, name: str) -> AbstractContextManager[None]:
        return self._timeline.span(name) if self._timeline else nullcontext()

    def _record(self, *args: Any, **kwargs: Any) -> None:
        self.gpu_metrics()  # for rank 0

    def gpu_metrics(self) -> dict[str, float]:
        """Returns the metrics of the GPUs of all nodes. A collective if there are several nodes."""
        return over_nodes(self._gather(self._gpus.take() if self._gpus else {}))

    def close(self) -> None:
        if self._profiler:
            self._profiler.stop()
        if self._timeline:
            self._timeline.close()
        if self._gpus:
            self._gpus.close()


def brief(metrics: roles.Values) -> str:
    """Formats the main metrics on one line: `reward 0.412  log-prob diff 2.1e-06  tokens/s 1,830`.

    The loss is omitted if there is a reward.
    """
    omitted = "loss" if metrics.get("reward/mean") is not None else None
    parts = []
    for key, style, name in _rows(SHOWN):
        value = metrics.get(key)
        if isinstance(value, int | float) and key != omitted:
            shown = "-" if value != value else style.format(value)  # NaN: nothing was measured
            parts.append(f"{name} {shown}")
    return "  ".join(parts)


class ProgressDisplay:
    """Shows each finished step and the remaining time, as a progress bar or a line per step.

    The remaining time is estimated without the first step, which includes warm-up.
    """

    def __init__(self, *, steps: int, start: int, name: str, interactive: bool) -> None:
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            speed_estimate_period=PACE_S,
            disable=not interactive,
        )
        self._task = self._bar.add_task(name, total=steps, completed=start, text="starting")
        self._bar.start()
        self.close = self._bar.stop

    def show(self, step: int, metrics: roles.Values) -> None:
        text = brief(metrics)
        self._bar.update(self._task, completed=step + 1)
        (task,) = self._bar.tasks
        if task.time_remaining:
            text += f"  {timedelta(seconds=task.time_remaining)} left"
        self._bar.update(self._task, text=text)
        if self._bar.disable:
            steps = str(task.total)
            print(f"{task.description} {step + 1:>{len(steps)}}/{steps}  {text}", flush=True)


class Telemetry:
    """Implements roles.Telemetry on rank 0.

    `facts` (world_size, layout) are added to every line of metrics.jsonl; `recorders` are the
    arguments of NodeTelemetry other than the timeline.
    """

    def __init__(
        self,
        config: Config,
        *,
        start: int,
        interactive: bool,
        facts: roles.Values,
        **recorders: Any,
    ) -> None:
        """Opens the files of a run that begins at step `start`; drops lines from that step on."""
        folder = config.run_dir
        self._passes = config.train.epochs_per_batch
        self._facts = facts
        self._samples = SampleWriter(
            folder / "rollouts", config.telemetry.rollouts, seed=config.run.seed, start=start
        )
        self._file = folder / "metrics.jsonl"
        forget_steps(self._file, start)
        self._timeline = Timeline(folder / "timeline.json")
        self._node = NodeTelemetry(self._timeline, **recorders)
        self.span = self._timeline.span
        self._trackers = Trackers(config, start=start)
        self._progress = ProgressDisplay(
            steps=config.train.steps, start=start, name=folder.name, interactive=interactive
        )
        self._added: dict[str, Any] = {}

    @contextmanager
    def step(self, step: int) -> Iterator[roles.Record]:
        self._timeline.seconds.clear()
        began = time.perf_counter()
        with self._node.step(step):
            yield partial(self._write, step, began)

    def add(self, metrics: roles.Values) -> None:
        """Adds metrics, such as peak memory, to the current step, or before the first step to that
        step. Of several values with one name, the largest is recorded.
        """
        self._added |= {
            name: max(value, self._added.get(name, value)) for name, value in metrics.items()
        }

    def evaluated(self, step: int, results: roles.Values) -> None:
        """Sends evaluation results to the trackers; eval.jsonl is written by the evaluation."""
        self._trackers.log(
            step, {f"eval/{name}": value for name, value in results.items()}, is_complete=False
        )

    def _write(
        self,
        step: int,
        began: float,
        rollout: Rollout | None,
        update: StepReport,
        sync: PublishReport | None,
        scored: ScoredBatch | None = None,
    ) -> None:
        took = time.perf_counter() - began
        groups = rollout.groups if rollout else ()
        samples = chain.from_iterable(group.samples for group in groups)
        sampled = sum(int(sample.trainable.sum()) for sample in samples)
        seconds = self._timeline.seconds
        metrics = {
            "step": step,
            **self._facts,
            **(rollout_metrics(rollout) if rollout else {}),
            **staleness_metrics(groups, step),
            **update_metrics(update),
            "time/step": took,
            **{f"time/{name}": seconds[span] for span, name in _rows(TIMES) if span in seconds},
            **(publish_metrics(sync) if sync else {}),
            **({"tokens_per_second": sampled / took} if sampled else {}),
            **self._added,
            **self._node.gpu_metrics(),
        }
        metrics |= speed_metrics(metrics, update, passes=self._passes)
        self._added.clear()
        # before metrics.jsonl: if the run is killed, a step in metrics.jsonl is in the timeline too
        self._timeline.flush()
        append_line(self._file, metrics)
        self._samples.write(step, groups, scored)
        self._trackers.log(step, metrics)
        self._progress.show(step, metrics)

    def close(self) -> None:
        self._progress.close()
        self._node.close()
        self._trackers.close()
