"""Metrics of one step, computed from what the roles returned, and their file: one JSON object per line.

    Rollout       --rollout_metrics-+
    StepReport    --update_metrics--+--> {key: value} --append_line--> runs/<name>/metrics.jsonl
    PublishReport --publish_metrics-+

Only rank 0 writes. A run can be killed at any byte, and a disk can fill up, so readers leave out lines they cannot use.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from megarl.platform.atomic import write_atomic

if TYPE_CHECKING:  # reading metrics needs no torch
    from megarl.types import Group, PublishReport, Rollout, StepReport

OF_SAMPLES = (
    "reward/mean",
    "reward/std",
    "reward/frac_zero_std",
    "length/mean",
    "length/truncated_frac",
)
MAX_INT = 2**53  # larger ones are no floats, so they cannot be drawn
OF_UPDATES = ("kl/ref", "clip_frac", "entropy")


def rollout_metrics(rollout: Rollout) -> dict[str, Any]:
    """Rewards, lengths, dropped samples and digest of one rollout; an empty one has the same keys, without values.
    Groups without spread and singletons are counted before filtering."""
    metrics = {
        **_sample_metrics(rollout.groups),
        "rollout/digest": rollout.digest,
        **rollout.counts,
    }
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
    names = sorted({name for sample in samples for name in sample.rewards})
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        **({"reward/baseline": fmean(baselines)} if baselines else {}),
        **{
            f"reward/{name}/mean": fmean(s.rewards[name] for s in samples if name in s.rewards)
            for name in names
        },
        "length/mean": fmean(lengths),
        "length/truncated_frac": fmean(sample.finish == "length" for sample in samples),
        "samples/count": len(samples),
        "samples/dropped": sum(count for group in groups for count in group.dropped.values()),
    }


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """How many versions the weights of each sampled token are behind those that are trained."""
    behind = [
        version - v for g in groups for s in g.samples for v in s.versions[s.trainable].tolist()
    ]
    return {"staleness/mean": fmean(behind), "staleness/max": max(behind)} if behind else {}


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


def append_line(file: Path, values: Mapping[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(_json_line(values))


def forget_steps(file: Path, start: int) -> None:
    """Removes the lines of steps from `start` on, which a resumed run repeats; creates the file if there is none."""
    earlier = [row for row in read_metrics(file) if row["step"] < start] if start else []
    write_atomic(file, "".join(map(_json_line, earlier)))


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl or eval.jsonl; numbers are finite or None."""
    return read_jsonl(file, step=int)


def read_jsonl(file: Path, **types: type) -> list[dict[str, Any]]:
    """The objects of a JSONL file that have these keys, with values of these types; none if there is no file.

    Integers are from 0 to 2**53. One warning counts the other lines. Bytes that are not UTF-8 become U+FFFD.
    """
    text = file.read_bytes().decode(errors="replace") if file.is_file() else ""
    # str.splitlines would also split at the line separators of Unicode, which JSON strings may contain
    rows = {
        number: _parse(line, types)
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    }
    if bad := [number for number, row in rows.items() if row is None]:
        count = f"{len(bad)} lines are" if len(bad) > 1 else "1 line is"
        print(
            f"megarl: warning: {file}: {count} left out, line {bad[0]} first: not JSON objects with {', '.join(types)}",
            file=sys.stderr,
        )
    return [row for row in rows.values() if row is not None]


def _parse(line: str, types: Mapping[str, type]) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or any(
        type(row.get(key)) is not kind for key, kind in types.items()
    ):
        return None  # True is not an int here
    if any(kind is int and not 0 <= row[key] <= MAX_INT for key, kind in types.items()):
        return None
    return {key: _finite(value) for key, value in row.items()}


def _json_line(values: Mapping[str, Any]) -> str:
    """NaN and infinity, which JSON lacks, become null."""
    return json.dumps({key: _finite(value) for key, value in values.items()}) + "\n"


def _finite(value: Any) -> Any:
    try:
        return value if not isinstance(value, int | float) or math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of floats
        return None
