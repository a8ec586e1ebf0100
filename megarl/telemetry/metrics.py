"""Metrics of one step, computed from what the roles returned, and their file: one JSON object per line.

    Rollout       --rollout_metrics-+
    StepReport    --update_metrics--+--> {key: value} --MetricsFile.write--> runs/<name>/metrics.jsonl
    PublishReport --publish_metrics-+

Only rank 0 calls these functions.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from megarl.platform.atomic import write_atomic

if TYPE_CHECKING:  # reading metrics needs no torch
    from megarl.types import Group, PublishReport, Rollout, StepReport

OF_SAMPLES = ("reward/mean", "reward/std", "reward/frac_zero_std", "length/mean", "length/truncated_frac")
OF_UPDATES = ("kl/ref", "clip_frac", "entropy")


def rollout_metrics(rollout: Rollout) -> dict[str, Any]:
    """Rewards, lengths, dropped samples and digest of one rollout; an empty one has the same keys, without values.

    The fraction of groups without spread and the count of singletons are over all generated groups, before filtering.
    """
    metrics = {**_sample_metrics(rollout.groups), "rollout/digest": rollout.digest, **rollout.counts}
    if not (generated := rollout.generated):
        return metrics | {"samples/count": 0} | dict.fromkeys(OF_SAMPLES)
    flat = [len({sample.reward for sample in group.samples}) <= 1 for group in generated]
    singletons = sum(len(group.samples) == 1 for group in generated)
    return metrics | {"reward/frac_zero_std": fmean(flat), "groups/singleton": singletons}


def _sample_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return {}
    rewards = [sample.reward or 0.0 for sample in samples]
    lengths = [int(sample.trainable.sum()) for sample in samples]
    baselines = [group.baseline for group in groups if group.baseline is not None]
    parts: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.rewards.items():
            parts[name].append(value)
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        **({"reward/baseline": fmean(baselines)} if baselines else {}),
        **{f"reward/{name}/mean": fmean(values) for name, values in sorted(parts.items())},
        "length/mean": fmean(lengths),
        "length/truncated_frac": fmean(sample.finish == "length" for sample in samples),
        "samples/count": len(samples),
        "samples/dropped": sum(count for group in groups for count in group.dropped.values()),
    }


def update_metrics(report: StepReport) -> dict[str, Any]:
    """Means over the updates of a step; `update/skipped` counts those that were skipped."""
    updates = report.updates
    if not updates:
        return {"updates": 0, "update/skipped": 0, **report.metrics}
    names = sorted({name for update in updates for name in update.metrics})
    return {
        **dict.fromkeys(OF_UPDATES),  # None without a reference, or without tokens
        "loss": fmean(update.loss for update in updates),
        "grad_norm": fmean(update.grad_norm for update in updates),
        "lr": updates[-1].lr,
        "updates": len(updates),
        "update/skipped": sum(update.skipped for update in updates),
        **{name: fmean(u.metrics[name] for u in updates if name in u.metrics) for name in names},
        **report.metrics,
    }


def publish_metrics(report: PublishReport) -> dict[str, Any]:
    return {
        "weights/version": report.version,
        "weights/bytes": report.bytes_kept,
        "weights/bytes_received": report.bytes_received,
        "weights/verified": report.verified,
        "time/publish": report.seconds,
    }


class MetricsFile:
    """Appends a line per step. A resumed run removes the lines of the steps that it repeats."""

    def __init__(self, file: Path, *, start: int) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        earlier = [line for line in read_metrics(file) if line["step"] < start] if start else []
        write_atomic(file, "".join(map(_line, earlier)))
        self._out = file.open("a", encoding="utf-8")

    def write(self, values: Mapping[str, Any]) -> None:
        self._out.write(_line(values))
        self._out.flush()

    def close(self) -> None:
        self._out.close()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, without a line that was cut short when a run was killed."""
    rows = []
    # str.splitlines would also split at the line separators of Unicode, which JSON strings may contain
    for line in file.read_text(encoding="utf-8").split("\n") if file.is_file() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def _line(values: Mapping[str, Any]) -> str:
    """NaN and infinity, which JSON lacks, become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(finite) + "\n"
