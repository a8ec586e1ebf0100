"""Writes sampled text to rollouts/step_<n>.jsonl, one JSON object per sample.

    groups --choose_samples--> best, worst and random samples --> step_<n>.jsonl

The number of files is bounded: the oldest files are removed.
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
    """Returns {step: sample file in `folder`}, oldest first."""
    steps = [
        (re.fullmatch(r"step_([0-9]{6,})\.jsonl", file.name), file)
        for file in folder.glob("step_*.jsonl")
    ]
    return dict(sorted((int(match[1]), file) for match, file in steps if match and file.is_file()))


def choose_samples(samples: Sequence[Sample], count: int, *, seed: str) -> list[int]:
    """Returns the sorted indices of at most `count` samples.

    A quarter has the highest rewards, a quarter the lowest, and the rest is random. Ties are broken
    at random. The choice depends only on the rewards and the seed.
    """
    random = Random(seed)
    order = random.sample(range(len(samples)), len(samples))
    if len(samples) > count:
        order.sort(key=lambda index: samples[index].reward or 0.0)  # stable: ties stay shuffled
        best = -(-count // 4)
        worst = min(best, count - best)
        order = (
            order[:worst] + order[-best:] + random.sample(order[worst:-best], count - best - worst)
        )
    return sorted(order)


class SampleWriter:
    """Writes the sample files of a run; at the start, removes those of steps from `start` on."""

    def __init__(self, folder: Path, settings: SampleFiles, *, seed: int, start: int) -> None:
        self._folder = folder
        self._settings = settings
        self._seed = seed
        folder.mkdir(parents=True, exist_ok=True)
        for step, file in sample_files(folder).items():
            if step >= start:
                file.unlink()

    def write(self, step: int, groups: Sequence[Group], scored: ScoredBatch | None) -> None:
        """Writes the file of a step if one is due, and removes the oldest files.

        Row i of `scored` must be sample i of the groups, in the order of `collate`.
        """
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
            if scored:  # mean over the row's trained tokens; None if there are none
                span = slice(*scored.cu_seqlens[row : row + 2].tolist())
                trained = scored.advantages[span][scored.mask[span]]
                line["advantage"] = float(trained.mean()) if trained.numel() else None
            text += json.dumps(line, ensure_ascii=False, default=str) + "\n"
        # lone surrogates from a tokenizer or a user's task cannot be encoded in UTF-8: escape them
        # as in JSON
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
        # runs of sampled tokens with one policy version: [version, number of tokens]
        "versions": [
            [v, len(list(run))] for v, run in groupby(sample.versions[sample.trainable].tolist())
        ],
    }
