"""Records each step in metrics.jsonl, timeline.json, rollouts/step_<n>.jsonl and trackers, and shows progress.

    with telemetry.step(n) as record:       starts the step's clocks
        with telemetry.span("update")       times time/update, and adds a span to the timeline
        telemetry.add({...})                adds metrics, for example the peak memory of a phase
        record(rollout, update, sync, ...)  computes the other metrics and writes everything
    telemetry.evaluated(n, {...})           passes results on held-out problems, after n steps, to the trackers

Rank 0 writes. The other ranks use `Silent`, which has the same methods, so that the loop needs no `if rank == 0`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from megarl.config.load import run_dir
from megarl.config.schema import Config
from megarl.roles import Record
from megarl.telemetry.gpus import open_gpus
from megarl.telemetry.metrics import MetricsFile, publish_metrics, rollout_metrics, update_metrics
from megarl.telemetry.progress import ProgressDisplay
from megarl.telemetry.sample_files import SampleWriter
from megarl.telemetry.timeline import Timeline
from megarl.telemetry.trackers import Trackers
from megarl.types import PublishReport, Rollout, ScoredBatch, StepReport

# time/<key> is the span of that name, or else that of the phase
TIMES = {"generate": "rollout", "reward": "", "logprobs": None, "update": "train", "save": None, "publish": "sync"}


class Silent:
    """Discards everything; used on all ranks but 0."""

    def step(self, step: int) -> AbstractContextManager[Record]:
        return nullcontext(lambda rollout, update, sync, scored=None: None)

    def span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def add(self, metrics: Mapping[str, Any]) -> None:
        return

    def evaluated(self, step: int, results: Mapping[str, Any]) -> None:
        return

    def close(self) -> None:
        return


class Telemetry:
    """roles.Telemetry of rank 0. `facts` (world_size, layout) are part of every line of metrics.jsonl."""

    def __init__(
        self, config: Config, *, start: int, interactive: bool, facts: Mapping[str, Any], gpu_uuids: Sequence[str] = ()
    ) -> None:
        folder, settings = run_dir(config), config.telemetry
        self._facts = dict(facts)
        self._samples = SampleWriter(folder / "rollouts", settings.rollouts, seed=config.run.seed, start=start)
        self._file = MetricsFile(folder / "metrics.jsonl", start=start)
        self._timeline = Timeline(folder / "timeline.json")
        self._trackers = Trackers(config, start=start)
        self._gpus = open_gpus(gpu_uuids)
        self._progress = ProgressDisplay(
            steps=config.train.steps, start=start, name=folder.name, interactive=interactive
        )
        self._added: dict[str, Any] = {}
        self._began = time.perf_counter()

    @contextmanager
    def step(self, step: int) -> Iterator[Record]:
        self._timeline.clear()
        self._began = time.perf_counter()
        with self._timeline.span(f"step {step}"):
            yield partial(self._write, step)
        self._timeline.flush()

    def span(self, name: str) -> AbstractContextManager[None]:
        return self._timeline.span(name)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds peaks to the current step, or to the first one before it begins; the largest of a name counts."""
        self._added |= {name: max(value, self._added.get(name, value)) for name, value in metrics.items()}

    def evaluated(self, step: int, results: Mapping[str, Any]) -> None:
        """Passes results on held-out problems to the trackers; their file is eval.jsonl."""
        self._trackers.log(step, {f"eval/{name}": value for name, value in results.items()}, is_complete=False)

    def _write(
        self,
        step: int,
        rollout: Rollout | None,
        update: StepReport,
        sync: PublishReport | None,
        scored: ScoredBatch | None = None,
    ) -> None:
        took = time.perf_counter() - self._began
        groups = rollout.groups if rollout else ()
        sampled = sum(int(sample.trainable.sum()) for group in groups for sample in group.samples)
        metrics = {
            "step": step,
            **self._facts,
            **(rollout_metrics(rollout) if rollout else {}),
            **update_metrics(update),
            **self._times(took),
            **(publish_metrics(sync) if sync else {}),
            **({"tokens_per_second": sampled / took} if sampled else {}),
            **self._added,
            **(self._gpus.take() if self._gpus else {}),
        }
        self._added.clear()
        self._timeline.flush()  # a step that is in metrics.jsonl is in the timeline too, whenever the run is killed
        self._file.write(metrics)
        self._samples.write(step, groups, scored)
        self._trackers.log(step, metrics)
        self._progress.show(step, metrics)

    def close(self) -> None:
        self._progress.close()
        self._timeline.close()
        self._file.close()
        if self._gpus:
            self._gpus.close()
        self._trackers.close()

    def _times(self, took: float) -> dict[str, float]:
        seconds = self._timeline.seconds
        times = {f"time/{key}": seconds.get(key, seconds.get(phase)) for key, phase in TIMES.items()}
        return {"time/step": took} | {key: value for key, value in times.items() if value is not None}


def open_telemetry(
    config: Config,
    *,
    rank: int,
    start: int,
    interactive: bool,
    facts: Mapping[str, Any],
    gpu_uuids: Sequence[str] = (),
) -> Telemetry | Silent:
    """The telemetry of one rank of a run that starts at step `start`; close it at the end of the run.

    Rank 0 monitors the GPUs with `gpu_uuids`.
    """
    if rank:
        return Silent()
    return Telemetry(config, start=start, interactive=interactive, facts=facts, gpu_uuids=gpu_uuids)
