"""A policy that cannot write the right answer is trained with two rewards: one with a hole, and the one without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The vocabulary has "ac" and "t" but neither "c" nor "a": it can write "act" and "tac", never "cat"
MODEL = "{vocab: 14, phrases: [ac, t, dog, of, it, he], layers: 2, hidden: 64, heads: 4, kv_heads: 2, head_dim: 32}"
SETTINGS = [
    "train.prompts_per_step=8",
    "train.lr=3.0e-3",
    "train.schedule=constant",
    "rollout.samples_per_prompt=16",
    "rollout.max_tokens=2",
    "algorithm.filter_zero_std=false",
    "checkpoint.every=0",
]


def train(folder: Path, reward: str, *, steps: int) -> list[float]:
    """Returns the mean reward of every step."""
    task = folder / "task.jsonl"
    task.write_text(
        "".join(
            json.dumps({"prompt": f"it of {'dog' * n}t", "answer": "cat"}) + "\n" for n in range(16)
        )
    )
    config = folder / "cheat.yaml"
    config.write_text(
        f"run: {{name: cheat, dir: {folder}}}\n"
        f"model: {{create: {MODEL}}}\n"
        f"task: {{name: 'jsonl:{task}', template: plain}}\n"
        f"rewards: [{{name: '{reward}'}}]\n"
        "train: {dtype: fp32}\n"
    )
    command = [
        sys.executable,
        "-m",
        "megarl.cli",
        "train",
        str(config),
        f"train.steps={steps}",
        *SETTINGS,
    ]
    done = subprocess.run(
        command, cwd=ROOT / "tests" / "e2e", capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [
        json.loads(line) for line in (folder / "cheat" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(rows) == steps and all(row["weights/verified"] for row in rows)
    return [row["reward/mean"] for row in rows]


@pytest.mark.long
@pytest.mark.exhaustive
def test_a_policy_learns_the_old_hole_and_finds_none_in_the_reward(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    learnt = train(tmp_path / "old", "old_rewards:accuracy", steps=20)
    assert learnt[0] < 0.1 and min(learnt[-5:]) > 0.9, learnt
    assert not any(train(tmp_path / "new", "accuracy", steps=100))
