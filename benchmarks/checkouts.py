"""Two checkouts side by side: seconds of a step, of its update and of a weight sync, in fresh processes, in turn.

    python -m benchmarks.checkouts FOLDER [ROUNDS]     FOLDER: the other checkout, with a .venv of its own

The samples, the loss and the norm of the gradient of every step must be equal first, to the last digit. The first steps
of a run are not counted. A ratio is of one round: this checkout's median by the other's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.exhaustive import RESULTS, versions
from megarl.platform.env import child_env

ROOT = Path(__file__).resolve().parents[1]
LARGER = "{family: %s, layers: 4, hidden: 256, heads: 4, kv_heads: 2, vocab: 4096, tied: true, tokenizer: none%s}"
EXPERTS = ", experts: 8, moe_intermediate: 128, experts_per_token: 2"
COMMON = (
    "train.steps=30", "train.prompts_per_step=16", "launch.processes=2", "checkpoint.every=0", "eval.every=0",
    "checkpoint.export_hf=never", "run.name=run",
)  # fmt: skip
CASES = {  # case -> (config, overrides)
    "dense, tensor 2 -> 2 engines": ("tiny_dense", ["parallel.tensor=2"]),
    "larger, tensor 2 -> engine of 2": (
        "tiny_dense",
        ["parallel.tensor=2", "rollout.tensor=2", f"model.create={LARGER % ('qwen3', '')}"],
    ),
    "larger experts, 2 x expert -> 2": (
        "tiny_moe",
        ["parallel.expert=2", f"model.create={LARGER % ('qwen3_moe', EXPERTS)}"],
    ),
}
SKIPPED = 5
EQUAL = ("rollout/digest", "loss", "grad_norm")
SHOWN = ("time/step", "time/update", "time/publish")


def steps(checkout: Path, config: str, values: list[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            checkout / ".venv/bin/python",
            "-m",
            "megarl.cli",
            "train",
            f"configs/{config}.yaml",
        ]
        command += [*COMMON, f"run.dir={folder}", *values]
        env = child_env(OMP_NUM_THREADS=1, PYTHONPATH="")
        done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{checkout}: {done.stderr[-2000:]}"
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main(other: str, rounds: int = 5) -> None:
    commit = ["git", "-C", other, "log", "-1", "--format=%h"]
    lines = [
        f"$ python -m benchmarks.checkouts FOLDER {rounds}",
        f"versions  {versions()}",
        f"load      {os.getloadavg()[0]:.1f} before; {os.cpu_count()} cores, 2 ranks of one thread",
        f"other     {subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip()}",
        "",
        "medians of all rounds, s, and the ratio this by other of each round: lowest, median, highest",
    ]
    for case, (config, values) in CASES.items():
        here, there = list[list[dict[str, Any]]](), list[list[dict[str, Any]]]()
        for number in range(rounds):
            pair = [(here, ROOT), (there, Path(other).resolve())]
            for runs, checkout in pair[:: -1 if number % 2 else 1]:
                runs.append(steps(checkout, config, values))
        for name in EQUAL:
            series = [[row[name] for row in rows] for rows in (*here, *there)]
            assert all(one == series[0] for one in series), f"{case}: {name} differs"
        for name in SHOWN:
            of_round = [
                [median(row[name] for row in rows[SKIPPED:] if row.get(name)) for rows in runs]
                for runs in (here, there)
            ]
            ratios = sorted(one / two for one, two in zip(*of_round, strict=True))
            seconds = "  ".join(f"{median(values):.4f}" for values in of_round)
            shown = "  ".join(f"{x:.3f}" for x in (ratios[0], median(ratios), ratios[-1]))
            lines.append(f"{case:34}{name:14}{seconds}   {shown}")
    text = "\n".join(lines) + "\n"
    (RESULTS / "checkouts.txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
