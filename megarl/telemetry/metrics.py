"""Metrics of one step, computed from what the roles returned, and their file: one JSON object per line.

    Rollout       --rollout_metrics-+
    StepReport    --update_metrics--+--> {key: value} --MetricsFile.write--> runs/<name>/metrics.jsonl
    PublishReport --publish_metrics-+

Pure functions; only rank 0 calls them.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from megarl.platform.atomic import write_atomic

if TYPE_CHECKING:  # reading metrics needs no torch
    from megarl.types import Group, PublishReport, Rollout, StepReport

__all__ = ["MetricsFile", "publish_metrics", "read_metrics", "rollout_metrics", "update_metrics"]


OF_SAMPLES = ("reward/mean", "reward/std", "reward/frac_zero_std", "length/mean", "length/truncated_frac")
OF_UPDATES = ("kl/ref", "clip_frac", "entropy")


def spread_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Fractions and counts over all generated groups, before filtering: those of equal rewards, those of one sample."""
    if not groups:  # the keys of any other step
        return {"samples/count": 0} | dict.fromkeys(OF_SAMPLES)
    flat = [len({sample.reward for sample in group.samples}) <= 1 for group in groups]
    return {"reward/frac_zero_std": fmean(flat), "groups/singleton": sum(len(group.samples) == 1 for group in groups)}


def rollout_metrics(rollout: Rollout) -> dict[str, Any]:
    """Rewards, lengths, drops and digest of one rollout."""
    counts = {"rollout/digest": rollout.digest, **rollout.counts, **spread_metrics(rollout.generated)}
    return _sample_metrics(rollout.groups) | counts


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
        **dict.fromkeys(OF_UPDATES),  # without a reference or without tokens
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
    """The lines of a metrics file, without those cut short when a run was killed."""
    return list(_parse(file.read_text(encoding="utf-8").splitlines())) if file.is_file() else []


def _parse(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and "step" in values:
            yield values


def _line(values: Mapping[str, Any]) -> str:
    """NaN and infinity, which JSON lacks, become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(finite) + "\n"
