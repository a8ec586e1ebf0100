"""Measures accuracy on held-out problems, with the engine that samples the rollouts.

held-out prompts -> generate (greedy, and at the temperature of rollouts) -> share of right answers -> eval.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.rollout.schedule import Generate, request_seed
from megarl.types import Prompt, Request, Sample


def correctness(sample: Sample) -> float:
    """1.0 if the accuracy reward is full; partial credit and unscored samples count as wrong.

    Without an accuracy reward, the sample's reward.
    """
    if sample.reward is None:
        return 0.0
    return float(sample.rewards["accuracy"] >= 1.0) if "accuracy" in sample.rewards else sample.reward


@dataclass(frozen=True)
class Evaluation:
    """roles.Evaluation: one sample per prompt at each temperature. Every rank must call every method."""

    generate: Generate
    prompts: Callable[[], Sequence[Prompt]]  # the same problems each time
    temperatures: tuple[tuple[str, float], ...]  # (name of the metric, temperature)
    run_seed: int
    every: int  # 0: never
    last_step: int
    file: Path | None = None  # eval.jsonl, on rank 0
    evaluated: Callable[[int, Mapping[str, Any]], None] | None = None  # Telemetry.evaluated

    def forget(self, start: int) -> None:
        """Drop the results of steps from `start` on: a resumed run measures them again."""
        if self.file is not None and self.file.exists():
            lines = [line for line in self.file.read_text().splitlines() if json.loads(line)["step"] < start]
            self.file.write_text("".join(f"{line}\n" for line in lines))

    def maybe_run(self, step: int) -> dict[str, Any] | None:
        """Run at the start, every `every` steps and at the end; otherwise return None."""
        due = self.every > 0 and (step == 0 or step % self.every == 0 or step == self.last_step)
        return self.run(step) if due else None

    def run(self, step: int) -> dict[str, Any]:
        """Returns "step", "size", and the share of right answers under the name of each metric."""
        prompts = self.prompts()
        result: dict[str, Any] = {"step": step, "size": len(prompts)}
        for name, temperature in self.temperatures:
            requests = [Request(p, 0, request_seed(self.run_seed, -1, p.prompt_id, 0), temperature) for p in prompts]
            samples = self.generate(requests, version=step)
            result[name] = sum(correctness(sample) for sample in samples) / max(len(samples), 1)
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(result) + "\n")
        if self.evaluated is not None:
            self.evaluated(step, result)
        return result
