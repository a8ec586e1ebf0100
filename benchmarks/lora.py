"""The quickstart's RL with LoRA instead of all weights, from the model of configs/quickstart_sft.yaml.

    python -m benchmarks.lora MODEL [--steps 60]      MODEL: runs/quickstart-sft/hf        about 5 minutes on two cores

Adapters are synced as such (lora.sync=adapter); then a few steps with merged weights, from the same seed. Writes
benchmarks/results/lora.{txt,png}.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from safetensors import safe_open

from benchmarks.exhaustive import RESULTS, ROOT, versions
from megarl.telemetry.metrics import read_metrics

MERGED_STEPS = 3


def train(folder: Path, model: Path, name: str, *keys: str) -> tuple[list[Any], list[Any], float]:
    """Returns the lines of metrics.jsonl and eval.jsonl, and the seconds."""
    command = [
        sys.executable,
        "-m",
        "megarl.cli",
        "train",
        "examples/lora/lora.yaml",
        f"model.path={model.resolve()}",
    ]
    began = time.monotonic()
    subprocess.run([*command, f"run.dir={folder}", f"run.name={name}", *keys], cwd=ROOT, check=True)
    held_out = folder / name / "eval.jsonl"
    evaluated = (
        [json.loads(line) for line in held_out.read_text().splitlines()]
        if held_out.is_file()
        else []
    )
    return list(read_metrics(folder / name / "metrics.jsonl")), evaluated, time.monotonic() - began


def digest(row: Any) -> str:
    return row["rollout/digest"]


def adapter_bytes(file: Path) -> int:
    with safe_open(file, "pt") as tensors:
        return sum(tensors.get_tensor(name).nbytes for name in tensors.keys())  # noqa: SIM118 (no mapping)


def draw(rows: list[Any], held_out: list[Any], file: Path) -> None:
    matplotlib.use("Agg")
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    axes.plot(
        [row["step"] + 1 for row in rows],
        [row["reward/mean"] for row in rows],
        color="#0b6bcb",
        label="reward",
    )
    for key, colour in (("sampled_accuracy", "#c2410c"), ("accuracy", "#15803d")):
        axes.plot(
            [x["step"] for x in held_out],
            [x[key] for x in held_out],
            "o",
            color=colour,
            label=f"held out, {key}",
        )
    axes.set(
        xlabel="step",
        ylim=(0, 1),
        title="quickstart with LoRA, rank 16, adapter sync, two CPU cores",
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, held_out, seconds = train(folder, args.model, "adapter", f"train.steps={args.steps}")
        size = adapter_bytes(folder / "adapter" / "adapter" / "adapter_model.safetensors")
        merged, *_ = train(
            folder,
            args.model,
            "merged",
            "lora.sync=merged",
            f"train.steps={MERGED_STEPS}",
            "eval.size=8",
        )
    syncs, engines = [row["weights/bytes"] for row in rows], rows[0]["world_size"]
    gain = [held_out[-1][key] - held_out[0][key] for key in ("sampled_accuracy", "accuracy")]
    lines = [
        f"$ python -m benchmarks.lora MODEL --steps {args.steps}",
        f"date      {time.strftime('%Y-%m-%d', time.gmtime())}",
        f"versions  {versions()}",
        "settings  examples/lora/lora.yaml; run.seed 1; MODEL is that of configs/quickstart_sft.yaml, run.seed 1",
        "",
        *(
            f"after {x['step']:>3} steps  sampled {x['sampled_accuracy']:.3f}  greedy {x['accuracy']:.3f}"
            for x in held_out
        ),
        f"gain               {gain[0]:+.3f}          {gain[1]:+.3f}       in {seconds:.0f} s, evaluations included",
        f"largest parity statistic {max(row['logprob_diff/statistic'] for row in rows):.2f}",
        f"bytes of a sync, all {engines} engines: {max(syncs)} to {min(syncs)}; adapters: {engines} x {size}",
        f"merged: {merged[0]['weights/bytes']} bytes; step, its loss here and there, samples equal:",
        *(
            f"  {here['step']}  {here['loss']:.9f}  {there['loss']:.9f}  {digest(here) == digest(there)}"
            for here, there in zip(merged, rows, strict=False)
        ),
    ]
    print("\n".join(lines))
    (RESULTS / "lora.txt").write_text("\n".join([*lines, ""]))
    draw(rows, held_out, RESULTS / "lora.png")
    return 0 if gain[0] > 0.1 and min(syncs) == engines * size else 1


if __name__ == "__main__":
    raise SystemExit(main())
