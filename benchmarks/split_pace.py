"""The split topology beside the colocated one, on the same cores: seconds a step, and who waits.

    python -m benchmarks.split_pace [ROUNDS]     writes benchmarks/results/split_pace.txt

The same number of processes that compute: two trainer ranks with an engine each, colocated, against a trainer rank and
an engine. Fresh processes, in turn; the first steps of a run are not counted. What shows is the cost of Ray, and what
overlapping generation with training takes back of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.exhaustive import RESULTS, versions
from megarl.platform.env import child_env

ROOT = Path(__file__).resolve().parents[1]
MODEL = "{family: qwen3, layers: 3, hidden: 128, heads: 4, kv_heads: 2, vocab: 67, tokenizer: none, tied: true}"
COMMON = (
    f"model.create={MODEL}", "train.steps=24", "train.prompts_per_step=32", "rollout.samples_per_prompt=8",
    "rollout.max_tokens=48", "checkpoint.every=0", "checkpoint.export_hf=never", "eval.every=0",
)  # fmt: skip
SPLIT = ("launch.topology=split", "launch.processes=1")
CASES = {
    "colocated": ("launch.processes=2",),
    "split, staleness 0": SPLIT,
    "split, staleness 1": (*SPLIT, "rollout.max_staleness=1"),
    "split, staleness 2": (*SPLIT, "rollout.max_staleness=2"),
}
SKIPPED = 4
SHOWN = ("time/step", "time/generate", "time/update", "time/publish")


def steps(name: str, values: tuple[str, ...]) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "megarl.cli",
            "train",
            "configs/tiny_dense.yaml",
            *COMMON,
            *values,
        ]
        command += [f"run.dir={folder}", "run.name=run"]
        done = subprocess.run(
            command, cwd=ROOT, env=child_env(OMP_NUM_THREADS=1), capture_output=True, text=True
        )
        assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][SKIPPED:]


def main(rounds: int = 3) -> None:
    before, runs = os.getloadavg()[0], {name: list[list[dict[str, float]]]() for name in CASES}
    for _ in range(rounds):
        for name, values in CASES.items():
            runs[name].append(steps(name, values))
    digests = {name: [row["rollout/digest"] for row in rows[0]] for name, rows in runs.items()}
    assert digests["colocated"] == digests["split, staleness 0"], "not the same samples"
    lines = [
        f"$ python -m benchmarks.split_pace {rounds}",
        f"versions  {versions()}",
        f"load      {before:.1f} before; {os.cpu_count()} cores; 256 samples of up to 48 tokens a step",
        "",
        "medians over the steps of all rounds, s; `against` is by time/step, of each round, lowest to highest",
        f"{'':20}"
        + "".join(f"{key.removeprefix('time/'):>10}" for key in SHOWN)
        + f"{'against colocated':>20}",
    ]
    of_round = {
        name: [median(row["time/step"] for row in rows) for rows in runs[name]] for name in CASES
    }
    for name in CASES:
        rows = [row for each in runs[name] for row in each]
        values = [median(row.get(key) or 0.0 for row in rows) for key in SHOWN]
        ratios = sorted(
            one / here for one, here in zip(of_round["colocated"], of_round[name], strict=True)
        )
        lines.append(
            f"{name:20}"
            + "".join(f"{value:10.3f}" for value in values)
            + f"{ratios[0]:13.2f}x-{ratios[-1]:.2f}x"
        )
    text = "\n".join(lines) + "\n"
    (RESULTS / "split_pace.txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
