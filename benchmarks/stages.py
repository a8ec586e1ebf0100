"""Runs the shipped config of a stage in a temporary folder and keeps its curves.

python -m benchmarks.stages ppo [key=value ...]       -> benchmarks/results/stages_ppo.{txt,png}
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
SHOWN = {  # columns of the table, of the metrics that the stage has
    "reward/mean": "reward",
    "reward/megarl.rewards.rules:even_fraction/mean": "even tokens",
    "reward_model/accuracy": "pairs right",
    "reward_model/replayed": "replayed",
    "accuracy": "accuracy",
    "score/difference": "difference",
    "rewards/accuracy": "pairs right",
    "rewards/margin": "margin",
    "reward/accuracy/mean": "accuracy",
    "accuracy/sampled": "accuracy",
    "loss": "loss",
    "eval/loss": "held out",
    "kl/teacher": "KL teacher",
    "value/loss": "value loss",
    "value/explained_variance": "explained",
    "value/mean": "value",
    "returns/mean": "return",
    "kl/ref": "KL",
    "entropy": "entropy",
    "time/step": "seconds",
}


def table(rows: list[dict[str, Any]]) -> list[str]:
    names = [name for name in SHOWN if any(row.get(name) is not None for row in rows)]
    lines = [f"{'step':>5}" + "".join(f"{SHOWN[name]:>12}" for name in names)]
    for row in rows:
        cells = [row.get(name) for name in names]
        shown = ["-" if cell is None else f"{cell:.4f}" for cell in cells]
        lines.append(f"{row['step']:>5}" + "".join(f"{cell:>12}" for cell in shown))
    return lines


def main(stage: str, *overrides: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        values = [f"run.dir={folder}", f"run.name={stage}", *overrides]
        command = [sys.executable, "-m", "megarl.cli", "train", f"configs/{stage}.yaml", *values]
        subprocess.run(command, cwd=HERE, check=True)
        run = Path(folder) / stage
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        file = run / "eval.jsonl"
        held_out = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        results = HERE / "benchmarks" / "results" / f"stages_{stage}"
        (results.with_suffix(".png")).write_bytes((run / "report.png").read_bytes())
    seconds = sum(row["time/step"] for row in rows)
    title = f"configs/{stage}.yaml {' '.join(overrides)}".strip()
    text = "\n".join([f"{title}: {len(rows)} steps, {seconds:.0f} s of them on a shared CPU", "", *table(rows), ""])
    for row in held_out:
        values = "  ".join(f"{name} {value:.4g}" for name, value in row.items() if name != "step")
        text += f"after {row['step']} steps, held out: {values}\n"
    results.with_suffix(".txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
