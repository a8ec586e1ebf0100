"""Writes sampled text to rollouts/step_<n>.jsonl, one object per sample, in a bounded number of
files.

    groups --choose_samples--> best, worst and random samples --> step_<n>.jsonl

The oldest files are removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby, repeat
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from megarl.config.schema import SampleFiles
from megarl.processes.files import write_atomic

if TYPE_CHECKING:  # finding the files needs no torch
    from megarl.types import Group, Sample, ScoredBatch


def sample_files(folder: Path) -> dict[int, Path]:
    """The files in `folder` by step, oldest first; others are ignored."""
    steps = [
        (re.fullmatch(r"step_([0-9]{6,})\.jsonl", file.name), file)
        for file in folder.glob("step_*.jsonl")
    ]
    return dict(sorted((int(match[1]), file) for match, file in steps if match and file.is_file()))


def choose_samples(samples: Sequence[Sample], count: int, *, seed: str) -> list[int]:
    """Increasing indices of at most `count` samples: a quarter have the highest rewards, a quarter
    the lowest; the rest, and the choice among equals, is random. It depends only on the rewards and
    the seed.
    """
    random = Random(seed)
    order = random.sample(range(len(samples)), len(samples))
    if len(samples) > count:
        order.sort(key=lambda index: samples[index].reward or 0.0)  # stable
        best = -(-count // 4)
        worst = min(best, count - best)
        order = (
            order[:worst] + order[-best:] + random.sample(order[worst:-best], count - best - worst)
        )
    return sorted(order)


class SampleWriter:
    """Writes the files of a run. A resumed run removes those of the steps that it repeats."""

    def __init__(self, folder: Path, settings: SampleFiles, *, seed: int, start: int) -> None:
        self._folder = folder
        self._settings = settings
        self._seed = seed
        folder.mkdir(parents=True, exist_ok=True)
        for step, file in sample_files(folder).items():
            if step >= start:
                file.unlink()

    def write(self, step: int, groups: Sequence[Group], scored: ScoredBatch | None) -> None:
        """Row i of `scored` is sample i of the groups, as `collate` orders them."""
        if not groups or not self._settings.every or step % self._settings.every:
            return
        rows = []
        for group in groups:
            rows += zip(repeat(group), group.samples)
        chosen = choose_samples(
            [sample for _, sample in rows], self._settings.max_samples, seed=f"{self._seed}/{step}"
        )
        text = ""
        for row in chosen:
            line = _line(*rows[row])
            if scored:  # the mean of the row's trained tokens; None if none is trained
                span = slice(*scored.cu_seqlens[row : row + 2].tolist())
                trained = scored.advantages[span][scored.mask[span]]
                line["advantage"] = float(trained.mean()) if trained.numel() else None
            text += json.dumps(line, ensure_ascii=False, default=str) + "\n"
        # a tokenizer or a user's task may produce lone surrogates, which UTF-8 lacks, but JSON can
        # escape
        write_atomic(
            self._folder / f"step_{step:06d}.jsonl", text.encode(errors="backslashreplace")
        )
        for file in list(sample_files(self._folder).values())[: -self._settings.keep]:
            file.unlink()


def _line(group: Group, sample: Sample) -> dict[str, Any]:
    return {
        "prompt_id": sample.prompt_id,
        "index": sample.index,
        "prompt": group.prompt.text,
        "response": sample.text,
        "answer": group.prompt.answer,
        "reward": sample.reward,
        "rewards": dict(sample.rewards),
        **({"steps": sample.step_rewards} if sample.step_rewards else {}),
        "length": int(sample.trainable.sum()),
        "truncated": sample.finish == "length",
        "finish": sample.finish,
        # of the sampled tokens: [version, number of tokens in a row]
        "versions": [
            [v, len(list(run))] for v, run in groupby(sample.versions[sample.trainable].tolist())
        ],
    }
