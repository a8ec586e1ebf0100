"""Records each step in metrics.jsonl, timeline.json and rollouts/step_<n>.jsonl, and shows progress.

    with telemetry.step(n) as record:     starts the step's clocks
        with telemetry.span("update")     times time/update, and adds a span to the timeline
        telemetry.add({...})              adds metrics, for example the peak memory of a phase
        record(rollout, update, sync)     computes the other metrics and writes everything

Rank 0 writes. The other ranks use `Silent`, which has the same methods, so that the loop needs no `if rank == 0`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from megarl.roles import Record
from megarl.telemetry.metrics import MetricsFile, publish_metrics, rollout_metrics, update_metrics
from megarl.telemetry.progress import ProgressDisplay
from megarl.telemetry.timeline import Timeline
from megarl.types import Group, PublishReport, Rollout, StepReport

# time/<key> is the span of that name, or else that of the phase
TIMES = {"generate": "rollout", "reward": "", "logprobs": None, "update": "train", "publish": "sync"}


class Silent:
    """Discards everything; used on all ranks but 0."""

    def step(self, step: int) -> AbstractContextManager[Record]:
        return nullcontext(lambda rollout, update, sync: None)

    def span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def add(self, metrics: Mapping[str, Any]) -> None:
        return

    def close(self) -> None:
        return


class Telemetry:
    """roles.Telemetry of rank 0. `facts` (world_size, layout) are part of every line of metrics.jsonl."""

    def __init__(self, folder: Path, *, steps: int, start: int, interactive: bool, facts: Mapping[str, Any]) -> None:
        self._folder, self._facts = folder, dict(facts)
        (folder / "rollouts").mkdir(parents=True, exist_ok=True)
        for file in (folder / "rollouts").glob("step_*.jsonl"):
            if int(file.stem.removeprefix("step_")) >= start:
                file.unlink()  # this run repeats the step
        self._file = MetricsFile(folder / "metrics.jsonl", start=start)
        self._timeline = Timeline(folder / "timeline.json")
        self._progress = ProgressDisplay(steps=steps, start=start, name=folder.name, interactive=interactive)
        self._added: dict[str, Any] = {}
        self._began = time.perf_counter()

    @contextmanager
    def step(self, step: int) -> Iterator[Record]:
        self._timeline.clear()
        self._added.clear()
        self._began = time.perf_counter()
        with self._timeline.span(f"step {step}"):
            yield partial(self._write, step)
        self._timeline.flush()

    def span(self, name: str) -> AbstractContextManager[None]:
        return self._timeline.span(name)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds metrics to the current step."""
        self._added.update(metrics)

    def _write(self, step: int, rollout: Rollout | None, update: StepReport, sync: PublishReport | None) -> None:
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
        }
        self._timeline.flush()  # a step that is in metrics.jsonl is in the timeline too, whenever the run is killed
        self._file.write(metrics)
        if groups:
            self._write_rollouts(step, groups)
        self._progress.show(step, metrics)

    def close(self) -> None:
        self._progress.close()
        self._timeline.close()
        self._file.close()

    def _times(self, took: float) -> dict[str, float]:
        seconds = self._timeline.seconds
        times = {f"time/{key}": seconds.get(key, seconds.get(phase)) for key, phase in TIMES.items()}
        return {"time/step": took} | {key: value for key, value in times.items() if value is not None}

    def _write_rollouts(self, step: int, groups: Sequence[Group]) -> None:
        with (self._folder / "rollouts" / f"step_{step:06d}.jsonl").open("w", encoding="utf-8") as out:
            for group in groups:
                for sample in group.samples:
                    values = {
                        "prompt_id": sample.prompt_id,
                        "index": sample.index,
                        "prompt": group.prompt.text,
                        "response": sample.text,
                        "answer": group.prompt.answer,
                        "reward": sample.reward,
                        "rewards": dict(sample.rewards),
                        **({"steps": sample.step_rewards} if sample.step_rewards else {}),
                        "finish": sample.finish,
                    }
                    out.write(json.dumps(values, ensure_ascii=False) + "\n")


def open_telemetry(
    folder: Path, *, rank: int, steps: int, start: int, interactive: bool, facts: Mapping[str, Any]
) -> Telemetry | Silent:
    """The telemetry of one rank; close it at the end of the run."""
    return Silent() if rank else Telemetry(folder, steps=steps, start=start, interactive=interactive, facts=facts)
