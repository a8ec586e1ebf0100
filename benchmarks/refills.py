"""Rounds of sampling in a step whose groups without spread are replaced, here or in another checkout.

    python -m benchmarks.refills [--against PATH ...]

The real schedule asks a policy of numbers: 8 samples of a prompt are right with the prompt's own chance, drawn from a
beta distribution whose mean changes over the run. A round is one call of the engines, which lasts as long as its
longest response. Seed 0.

    rounds      of a step, mean and largest; `first` is the share of steps that need only one
    sampled     groups for each one that is trained on
    lost        groups with spread that are neither trained on nor come again, for each one that is trained on
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megarl.platform.env import child_env

HERE = Path(__file__).resolve().parents[1]
STEPS, SAMPLES = 40, 8
RUNS = {  # prompts a step, mean chance at the start and at the end, sum of the beta's parameters
    "learns, 0.3 to 0.9": (64, 0.3, 0.9, 1.5),
    "hard, 0.02 to 0.3": (64, 0.02, 0.3, 1.0),
    "nearly solved, 0.9 to 0.98": (64, 0.9, 0.98, 1.0),
    "small batch, 0.3 to 0.9": (8, 0.3, 0.9, 1.5),
}


class Stream:
    """roles.Prompts, of this checkout and of earlier ones."""

    def __init__(self) -> None:
        self.position = 0
        self.kept: dict[str, float] = {}

    def observe(self, groups: Any) -> None:
        pass

    def take(self, count: int) -> list[Any]:
        from megarl.types import Prompt

        self.position += count
        return [Prompt(number, (1,), "") for number in range(self.position - count, self.position)]

    def put_back(self, prompts: Sequence[Any]) -> None:
        self.position -= len(prompts)


def measure(count: int, first: float, last: float, total: float) -> dict[str, float]:
    import torch

    from megarl.rollout.schedule import Rollouts
    from megarl.types import Group, Sample

    def has_spread(group: Group) -> bool:  # of samples without tokens
        return len({sample.reward for sample in group.samples}) > 1

    draw, chances, step_now = random.Random(0), {}, 0
    empty = {
        "tokens": torch.zeros(1, dtype=torch.int64),
        "trainable": torch.zeros(1, dtype=torch.bool),
    }

    def generate(requests: Any, *, version: int) -> list[Any]:
        mean = first + (last - first) * step_now / STEPS
        samples = []
        for request in requests:
            number = request.prompt.prompt_id
            chance = chances.setdefault(
                (version, number), draw.betavariate(total * mean, total * (1 - mean))
            )
            reward = float(draw.random() < chance)
            place = {
                "prompt_id": number,
                "index": request.index,
                "versions": (version, version),
                "finish": "stop",
            }
            samples.append(Sample(**place, **empty, rollout_logprobs=torch.zeros(1), reward=reward))
        return samples

    rollouts = Rollouts(generate, SAMPLES, 1.0, 0, filter_zero_std=True)
    stream, rounds, sampled, trained, kept = Stream(), [], 0, 0, set()
    for step_now in range(STEPS):
        rollout = rollouts.collect(stream, count, version=step_now)
        rounds.append(rollout.counts["rollout/refills"] + 1)
        sampled += len(rollout.generated)
        trained += len(rollout.groups)
        for group in rollout.generated:  # the last time that it is sampled
            (kept.add if has_spread(group) else kept.discard)(group.prompt.prompt_id)
        kept -= {group.prompt.prompt_id for group in rollout.groups}
    lost = sum(number < stream.position for number in kept)
    return {
        "rounds": fmean(rounds),
        "largest": max(rounds),
        "first": fmean(number == 1 for number in rounds),
        "groups": trained / STEPS,
        "sampled": sampled / trained,
        "lost": lost / trained,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.refills", description=__doc__)
    parser.add_argument(
        "--against", metavar="PATH", type=Path, nargs="*", default=[], help="other checkouts"
    )
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps([list(measure(*run).values()) for run in RUNS.values()]))
        return 0
    trees = {tree.name: tree for tree in args.against} | {"now": HERE}
    print(f"{STEPS} steps, {SAMPLES} samples a prompt, at most 4 batches of fresh prompts a step\n")
    print(f"{'':36}{'rounds':>8}{'largest':>8}{'first':>8}{'groups':>8}{'sampled':>8}{'lost':>8}")
    command, found = [sys.executable, __file__, "--run"], {}
    for which, tree in trees.items():
        found[which] = json.loads(
            subprocess.check_output(command, env=child_env(PYTHONPATH=str(tree)))
        )
    for number, name in enumerate(RUNS):
        for which, rows in found.items():
            print(f"{name:28}{which:8}" + "".join(f"{value:8.3g}" for value in rows[number]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
