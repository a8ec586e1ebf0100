"""Measures accuracy on held-out problems, with the engine that samples the rollouts.

problems of each set -> generate, k samples of each -> share of right answers, pass@k, intervals -> eval.jsonl
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from megarl.algorithms.pass_at_k import ks_of, mean_interval, pass_at_k
from megarl.rollout.schedule import Generate, request_seed
from megarl.telemetry.metrics import append_line, forget_steps
from megarl.types import Prompt, Request, Sample


def correctness(sample: Sample) -> float:
    """1.0 if the accuracy reward is full, else 0.0; without an accuracy reward, the reward. Unscored samples: 0.0."""
    if sample.reward is None:
        return 0.0
    return (
        float(sample.rewards["accuracy"] >= 1.0) if "accuracy" in sample.rewards else sample.reward
    )


Measure = Callable[
    [int], Mapping[str, float]
]  # of a step: the size of a set, metrics and their /low and /high


@dataclass(frozen=True)
class ProblemSet:
    """Problems, and how often and at which temperature each is sampled. `metric` names the mean: aime/mean@4."""

    metric: str
    prompts: Callable[[], Sequence[Prompt]]  # the same problems each time
    temperature: float
    samples: int = 1  # of each problem


@dataclass(frozen=True)
class Evaluation:
    """roles.Evaluation. Every rank must call every method."""

    measures: Sequence[Measure]
    every: int  # 0: never
    last_step: int
    file: Path | None = None  # eval.jsonl, on rank 0
    evaluated: Callable[[int, Mapping[str, Any]], None] = lambda step, result: (
        None
    )  # Telemetry.evaluated
    say: Callable[[str], None] = lambda table: None  # prints it, on rank 0
    measured: set[int] = field(
        default_factory=set
    )  # steps; iterations of a run end and begin at the same one

    def forget(self, start: int) -> None:
        """Drop the results of steps from `start` on: a resumed run measures them again."""
        if self.file is not None and self.file.exists():
            forget_steps(self.file, start)

    def maybe_run(self, step: int) -> dict[str, Any] | None:
        """Run at the start, every `every` steps and at the end; otherwise return None."""
        due = self.every > 0 and (step == 0 or step % self.every == 0 or step == self.last_step)
        return self.run(step) if due and step not in self.measured else None

    def run(self, step: int) -> dict[str, Any]:
        """Returns "step", and the size and metrics of each set; each metric has a 95% interval, /low to /high."""
        self.measured.add(step)
        result: dict[str, Any] = {"step": step}
        for measure in self.measures:
            result |= measure(step)
        if self.file is not None:
            append_line(self.file, result)
        self.evaluated(step, result)
        self.say(describe(result))
        return result


def sampled(generate: Generate, run_seed: int, part: ProblemSet, step: int) -> dict[str, float]:
    """Samples the problems of a set with the engine: the mean score of a problem, and pass@k."""
    prompts = part.prompts()
    requests = [
        Request(
            prompt, index, request_seed(run_seed, -1, prompt.prompt_id, index), part.temperature
        )
        for prompt in prompts
        for index in range(part.samples)
    ]
    scores: dict[int, list[float]] = {prompt.prompt_id: [] for prompt in prompts}
    for sample in generate(requests, version=step):
        scores[sample.prompt_id].append(correctness(sample))
    is_binary = all(value in (0.0, 1.0) for values in scores.values() for value in values)
    means = [fmean(values) for values in scores.values()]
    prefix, result = (
        _prefix(part.metric),
        with_interval(part.metric, means, part.samples if is_binary else None),
    )
    result = {f"{prefix}size": len(prompts), **result}
    for k in ks_of(part.samples):
        passed = [
            pass_at_k(len(values), sum(v >= 1.0 for v in values), k) for values in scores.values()
        ]
        result |= with_interval(f"{prefix}pass@{k}", passed, part.samples)
    return result


def _prefix(metric: str) -> str:
    """Of the other metrics of its set: "aime/", or "" for the held-out problems of the task."""
    return metric[: metric.rfind("/") + 1]


def with_interval(name: str, scores: Sequence[float], samples: int | None = 1) -> dict[str, float]:
    """Returns the mean score and its 95% interval (`mean_interval`)."""
    low, high = mean_interval(scores, samples)
    return {name: fmean(scores), f"{name}/low": low, f"{name}/high": high}


def describe(result: Mapping[str, Any]) -> str:
    """A table of one evaluation: every metric, its 95% interval and the number of problems."""
    rows = [(f"step {result['step']}", "value", "95% interval", "problems")]
    for name, value in result.items():
        if f"{name}/low" in result:
            interval = f"{result[f'{name}/low']:.3f} .. {result[f'{name}/high']:.3f}"
            rows.append((name, f"{value:.3f}", interval, str(result[f"{_prefix(name)}size"])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(n) for text, n in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
