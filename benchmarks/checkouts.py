"""Two checkouts side by side: seconds of a step, of its update and of a weight sync.

    python -m benchmarks.checkouts FOLDER [ROUNDS]     FOLDER: the other checkout, with a .venv of its own

Both run at the same time, one rank each, on a core each, which they exchange after every round: what else the machine
does slows both. The samples, the loss and the norm of the gradient of every step must be equal first, to the last
digit. The first steps of a run are not counted. A ratio is of one round: this checkout's median by the other's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from subprocess import DEVNULL, Popen
from typing import Any

from benchmarks.exhaustive import RESULTS, versions
from megarl.platform.env import child_env

ROOT = Path(__file__).resolve().parents[1]
LARGER = "{family: %s, layers: 4, hidden: 256, heads: 4, kv_heads: 2, vocab: 4096, tied: true, tokenizer: none%s}"
EXPERTS = ", experts: 8, moe_intermediate: 128, experts_per_token: 2"
COMMON = (
    "train.steps=40", "launch.processes=1", "checkpoint.every=0", "eval.every=0", "checkpoint.export_hf=never",
    "run.name=run",
)  # fmt: skip
CASES = {  # case -> (config, overrides)
    "tiny": ("tiny_dense", []),
    "dense": ("tiny_dense", [f"model.create={LARGER % ('qwen3', '')}"]),
    "experts": ("tiny_moe", [f"model.create={LARGER % ('qwen3_moe', EXPERTS)}"]),
}
SKIPPED = 5
EQUAL = ("rollout/digest", "loss", "grad_norm")
SHOWN = ("time/step", "time/update", "time/publish")


def start(checkout: Path, folder: Path, core: int, config: str, values: list[str]) -> Popen[str]:
    command = [checkout / ".venv/bin/python", "-m", "megarl.cli", "train", f"configs/{config}.yaml"]
    command += [*COMMON, f"run.dir={folder}", *values]
    env = child_env(OMP_NUM_THREADS=1, PYTHONPATH="")
    return Popen(
        ["taskset", "-c", str(core), *command], cwd=checkout, env=env, stdout=DEVNULL, text=True
    )


def side_by_side(
    checkouts: list[Path], config: str, values: list[str], first: int
) -> list[list[dict[str, Any]]]:
    """The metrics of each checkout's run; the first one has core `first`."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(number) for number in range(2)]
        cores = (first, 1 - first)
        runs = [
            start(*each, config, values) for each in zip(checkouts, folders, cores, strict=True)
        ]
        assert [run.wait() for run in runs] == [0, 0]
        texts = [(folder / "run" / "metrics.jsonl").read_text() for folder in folders]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


def main(other: str, rounds: int = 4) -> None:
    commit = ["git", "-C", other, "log", "-1", "--format=%h"]
    lines = [
        f"$ python -m benchmarks.checkouts FOLDER {rounds}",
        f"versions  {versions()}",
        f"load      {os.getloadavg()[0]:.1f} before; {os.cpu_count()} cores, one for each",
        f"other     {subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip()}",
        "",
        "medians of all rounds, s, and the ratio this by other of each round: lowest, median, highest",
    ]
    checkouts = [ROOT, Path(other).resolve()]
    for case, (config, values) in CASES.items():
        of_rounds = [side_by_side(checkouts, config, values, n % 2) for n in range(rounds)]
        for name in EQUAL:
            series = [[row[name] for row in rows] for pair in of_rounds for rows in pair]
            assert all(one == series[0] for one in series), f"{case}: {name} differs"
        for name in SHOWN:
            medians = [
                [median(row[name] for row in rows[SKIPPED:] if row.get(name)) for rows in pair]
                for pair in of_rounds
            ]
            ratios = sorted(here / there for here, there in medians)
            seconds = "  ".join(f"{median(side):.4f}" for side in zip(*medians, strict=True))
            shown = "  ".join(f"{x:.3f}" for x in (ratios[0], median(ratios), ratios[-1]))
            lines.append(f"{case:10}{name:14}{seconds}   {shown}")
    text = "\n".join(lines) + "\n"
    (RESULTS / "checkouts.txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
