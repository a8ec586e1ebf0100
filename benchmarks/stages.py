"""Runs the shipped config of a stage, or a case of CASES, in a temporary folder and keeps its curves.

python -m benchmarks.stages ppo [key=value ...]       -> benchmarks/results/stages_ppo.{txt,png}
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from megarl.config.load import load_config

HERE = Path(__file__).resolve().parents[1]
CONFIGS = {
    path.stem: path.relative_to(HERE)
    for folder in ("configs", "examples")
    for path in HERE.glob(f"{folder}/**/*.yaml")
}
LINES = "model.create={layers: 2, hidden: 64, heads: 4, kv_heads: 2, head_dim: 32, vocab: 20}"  # digits, line feed ...
JUDGED = ["task={name: 'benchmarks.stages:judged_lines', template: plain}", LINES]
EVEN = "megarl.rewards.rules:even_fraction"
SHORT = ["train.steps=40", "train.prompts_per_step=16", "train.lr=1.0e-3"]
# more curves: name and config of each run, the last of which is shown; FOLDER has those before
CASES: dict[str, list[list[str]]] = {
    "distill": [["sft", "sft"], ["distill", "distill", "teacher.model=FOLDER/sft/hf"]],
    "distill_top_k": [
        ["sft", "sft"],
        ["distill", "distill", "teacher.model=FOLDER/sft/hf", "algorithm.distill_top_k=16"],
    ],
    "process_reward_model": [["model", "reward_model", "reward_model={process: true}", *JUDGED]],
    "model_reward": [
        ["model", "reward_model"],
        [
            "policy",
            "tiny_dense",
            f"rewards=[{{name: model, options: {{path: FOLDER/model/hf}}}}, {{name: '{EVEN}', weight: 0}}]",
            *SHORT,
        ],
    ],
    "grpo_process": [
        [
            "model",
            "reward_model",
            "reward_model={process: true}",
            *JUDGED,
            "rollout.max_prompt_tokens=8",
        ],
        [
            "policy",
            "tiny_dense",
            "algorithm.advantage=grpo_process",
            "rewards=[{name: model, options: {path: FOLDER/model/hf, splitter: newline}}, "
            "{name: 'benchmarks.stages:right_lines', weight: 0}]",
            *SHORT,
            *JUDGED,
        ],
    ],
}
SHOWN = {  # columns of the table, of the metrics that the stage has
    "reward/mean": "reward",
    "reward/megarl.rewards.rules:even_fraction/mean": "even tokens",
    "reward/benchmarks.stages:right_lines/mean": "lines right",
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


def judged_lines(*, split: str, size: int = 4096) -> list[dict[str, Any]]:
    """Responses of one to four lines of digits; a line is right if its last digit is even."""
    draw = random.Random(f"lines/{split}")
    rows = []
    for _ in range(size):
        lines = [
            "".join(draw.choices("0123456789", k=draw.randint(1, 6)))
            for _ in range(draw.randint(1, 4))
        ]
        labels = [int(line[-1]) % 2 == 0 for line in lines]
        rows.append({"prompt": draw.choice("0123456789"), "completions": lines, "labels": labels})
    return rows


def right_lines(*, response: str) -> float:
    """The share of complete lines whose last character is an even digit."""
    lines = response.split("\n")[:-1]
    return sum(line[-1:] in tuple("02468") for line in lines) / max(len(lines), 1)


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
        for name, config, *keys in CASES.get(stage, [[stage, stage]]):
            values = [key.replace("FOLDER", folder) for key in (*keys, *overrides)]
            command = [
                sys.executable,
                "-m",
                "megarl.cli",
                "train",
                str(CONFIGS[config]),
                f"run.dir={folder}",
            ]
            subprocess.run([*command, f"run.name={name}", *values], cwd=HERE, check=True)
        run = Path(folder) / name
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        file = run / "eval.jsonl"
        held_out = (
            [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        )
        seed = load_config(run / "config.yaml").run.seed
        results = HERE / "benchmarks" / "results" / f"stages_{stage}"
        (results.with_suffix(".png")).write_bytes((run / "report.png").read_bytes())
    seconds = sum(row["time/step"] for row in rows)
    title = f"{CONFIGS[config]} {' '.join((*keys, *overrides))}".strip()
    facts = f"{len(rows)} steps, {seconds:.0f} s of them on a shared CPU, run.seed {seed}"
    text = "\n".join([f"{title}: {facts}", "", *table(rows), ""])
    for row in held_out:
        values = "  ".join(f"{name} {value:.4g}" for name, value in row.items() if name != "step")
        text += f"after {row['step']} steps, held out: {values}\n"
    results.with_suffix(".txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
