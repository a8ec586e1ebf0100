"""Computes the metrics of a step from what the roles returned, and reads and writes metrics.jsonl.

    Rollout       --rollout_metrics-+
    StepReport    --update_metrics--+--> {key: value} --append_line--> runs/<name>/metrics.jsonl
    PublishReport --publish_metrics-+

Each line is one JSON object; only rank 0 writes. A run can be killed at any byte, and a disk can
fill up, so readers skip invalid lines.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import isnan
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from megarl.processes.exit_codes import say
from megarl.processes.files import replacing

if TYPE_CHECKING:  # reading metrics needs no torch
    from megarl.types import Group, PublishReport, Rollout, StepReport

NamedValues = Mapping[str, Any]  # by name
Row = dict[str, Any]  # one line of a JSONL file
OF_SAMPLES = ("reward/mean", "reward/std", "length/mean", "length/truncated_frac")
MAX_INT = 2**53  # larger integers have no exact float, so they cannot be drawn
OF_UPDATES = ("kl/ref", "clip_frac", "entropy")


def rollout_metrics(rollout: Rollout) -> Row:
    """Returns rewards, lengths, counts of dropped samples, and the digest of one rollout.

    `reward/mean` and so on are means over the groups to train on; `reward/sampled/mean` and so on
    are means over all sampled groups. `reward/frac_zero_std` and `groups/singleton` describe all
    sampled groups. For an empty rollout, the values of these keys are None.
    """
    metrics = {
        **_sample_metrics(rollout.groups),
        "rollout/digest": rollout.digest,
        **rollout.counts,
    }
    generated = rollout.generated
    if not generated:
        empty = [*OF_SAMPLES, *map(_of_all, OF_SAMPLES), "reward/frac_zero_std"]
        return metrics | {"samples/count": 0} | dict.fromkeys(empty)
    for key, value in _sample_metrics(generated).items():
        metrics[_of_all(key)] = value
    return metrics | {
        "reward/frac_zero_std": rollout.counts.get("groups/flat", 0) / len(generated),
        "groups/singleton": sum(len(group.samples) == 1 for group in generated),
    }


def _of_all(key: str) -> str:
    return key.replace("/", "/sampled/", 1)


def _sample_metrics(groups: Sequence[Group]) -> Row:
    samples = list(chain.from_iterable(group.samples for group in groups))
    if not samples:
        return {}
    rewards = [sample.reward or 0.0 for sample in samples]
    baselines = [group.baseline for group in groups if group.baseline is not None]
    metrics = {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)}
    if baselines:
        metrics["reward/baseline"] = fmean(baselines)
    for name, mean in _means_by_name([sample.rewards for sample in samples]).items():
        metrics[f"reward/{name}/mean"] = mean
    return metrics | {
        "length/mean": fmean(int(sample.trainable.sum()) for sample in samples),
        "length/truncated_frac": fmean(sample.finish == "length" for sample in samples),
        "samples/count": len(samples),
    }


def _means_by_name(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns {name: mean over the rows that have it}, sorted by name."""
    return {
        name: fmean([row[name] for row in rows if name in row])
        for name in sorted(set(chain.from_iterable(rows)))
    }


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Returns the mean and maximum staleness of the sampled tokens: `version` minus the policy
    version that sampled the token. Empty without sampled tokens.
    """
    behind = []
    for group in groups:
        for sample in group.samples:
            behind += (version - sample.versions[sample.trainable]).tolist()
    if not behind:
        return {}
    return {"staleness/mean": fmean(behind), "staleness/max": max(behind)}


def update_metrics(report: StepReport) -> Row:
    """Returns means over the updates of a step; `update/skipped` counts skipped updates.

    `loss` and `grad_norm` are NaN if no update has measured a loss.
    """
    updates = report.updates
    measured = [one for one in updates if not (one.skipped and isnan(one.loss))] or updates
    if not updates:
        return {"updates": 0, "update/skipped": 0, **report.metrics}
    return {
        **dict.fromkeys(OF_UPDATES),  # None if not measured, for example without a reference
        "loss": fmean(update.loss for update in measured),
        "grad_norm": fmean(update.grad_norm for update in measured),
        "lr": updates[-1].lr,
        "updates": len(updates),
        "update/skipped": sum(update.skipped for update in updates),
        **_means_by_name([update.metrics for update in updates]),
        **report.metrics,
    }


def speed_metrics(metrics: Mapping[str, Any], report: StepReport, *, passes: int) -> Row:
    """Returns the tokens that a step trained on, per second of the step and GPU (or rank, on a
    CPU), and the share of the GPUs' peak FLOP/s that the updates reached, if the peak is known.

    The step has the given metrics, and its updates passed over each row `passes` times.
    """
    tokens = sum(update.tokens for update in report.updates) / passes
    if not tokens:
        return {}
    speed = {"perf/tokens_per_gpu_second": tokens / metrics["time/step"] / metrics["world_size"]}
    flops = sum(update.flops for update in report.updates)
    peak = report.updates[0].peak_flops
    if peak and flops:
        speed["perf/mfu"] = flops / metrics["time/update"] / peak
    return speed


def publish_metrics(report: PublishReport) -> Row:
    return {
        "weights/version": report.version,
        "weights/bytes": report.bytes_kept,
        "weights/bytes_received": report.bytes_received,
        "weights/verified": report.verified,
        "time/publish": report.seconds,
    }


def append_line(file: Path, values: NamedValues) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(_json_line(values))


def forget_steps(file: Path, start: int, *lines: NamedValues) -> None:
    """Replaces the lines of step `start` and later steps, which a resumed run repeats, by `lines`.

    The replacement is atomic. Creates the file if it does not exist.
    """
    with replacing(file) as staging, staging.open("w", encoding="utf-8") as out:
        for row in iterate_jsonl(file, step=int):
            if row["step"] < start:
                out.write(_json_line(row))
        out.writelines(map(_json_line, lines))


def read_metrics(file: Path, most: int = sys.maxsize) -> list[Row]:
    """Returns the rows of metrics.jsonl or eval.jsonl; numbers are finite or None.

    Of a file with more than `most` lines, every n-th is read, including the last.
    """
    count = 0
    if file.is_file():
        with file.open("rb") as text:
            count = sum(1 for _ in text)
    every = max(1, -(-count // most))
    return list(iterate_jsonl(file, every, count, step=int))


def iterate_jsonl(file: Path, every: int = 1, last: int = 0, **types: type) -> Iterator[Row]:
    """Yields the objects of a JSONL file whose values have the given types, {key: type}.

    Reads line `last` and lines at a distance of `every` from each other. Integers must be from 0 to
    2**53. All other lines are skipped, with one warning that counts them. Bytes that are not UTF-8
    become U+FFFD. Yields nothing if the file does not exist.
    """
    if not file.is_file():
        return
    bad = []
    with file.open("rb") as lines:  # binary: text would also be split at Unicode line separators
        for number, line in enumerate(lines, 1):
            if (last - number) % every:
                continue
            row = _parse(line.decode(errors="replace"), types)
            if row is not None:
                yield row
            elif line.strip():
                bad.append(number)
    if bad:
        count = f"{len(bad)} lines are" if len(bad) > 1 else "1 line is"
        say(
            f"warning: {file}: {count} left out, line {bad[0]} first: not JSON objects with "
            f"{', '.join(types)}"
        )


def _parse(line: str, types: Mapping[str, type]) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    for key, kind in types.items():
        value: Any = row.get(key)
        # bool does not count as int
        if type(value) is not kind or (kind is int and not 0 <= value <= MAX_INT):
            return None
    return _finite(row)


def _json_line(values: NamedValues) -> str:
    return json.dumps(_finite(values)) + "\n"


def _finite(values: NamedValues) -> Row:
    """Replaces NaN and infinity, which JSON lacks, and integers beyond float range with None."""
    finite = dict(values)
    for key, value in values.items():
        if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
            finite[key] = None
    return finite
