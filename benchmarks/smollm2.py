"""A real model: SmolLM2-135M-Instruct learns to add with examples/addition/addition.yaml as it is, and layouts agree on it.

    python -m benchmarks.smollm2 MODEL [--seeds 1 2 3] [--only seeds|layouts]       about 80 minutes on two cores

seeds     a run for each run.seed, one after another: accuracy on 256 held-out problems before and after, its seconds
layouts   the first step of each of LAYOUTS, in fp32 and in one process in bf16: same samples, loss, gradient norm

Writes benchmarks/results/smollm2_{seeds,layouts}.txt and, with seeds, docs/smollm2.png. MODEL: see scripts/smollm2.sh.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

from benchmarks.exhaustive import RESULTS, ROOT, versions
from megarl.telemetry.metrics import read_metrics

LAYOUTS = {
    "one process": "",
    "dp2": "launch.processes=2",
    "pp2": "launch.processes=2 parallel.pipeline=2",
    "tp3": "launch.processes=3 parallel.tensor=3",
}
FIRST_STEP = "train.steps=1 eval.every=0 checkpoint.export_hf=never"
# Relative. The gradient's tokens are weighted with exp(trainer - engine), which rounds as their log-probs do: of tp3's
# 1.2e-5, that is 1.16e-5 (fp64 gradients of the same rows by transformers; the rest is 2e-7)
TOLERANCE = {"loss": 1e-5, "grad_norm": 2e-5}
FIGURES = {"sampled_accuracy": "sampled", "accuracy": "greedy"}
Row = Mapping[str, Any]


def train(folder: Path, model: Path, keys: Sequence[str]) -> tuple[Sequence[Row], Sequence[Row]]:
    """Returns the lines of metrics.jsonl and eval.jsonl."""
    command = [
        sys.executable,
        "-m",
        "megarl.cli",
        "train",
        "examples/addition/addition.yaml",
        f"model.path={model.resolve()}",
    ]
    subprocess.run([*command, f"run.dir={folder}", *keys], cwd=ROOT, check=True, stdout=sys.stderr)
    return read_metrics(folder / "smollm2" / "metrics.jsonl"), read_metrics(
        folder / "smollm2" / "eval.jsonl"
    )


def learn(model: Path, seeds: Sequence[int]) -> Iterator[str]:
    runs: dict[int, tuple[Sequence[Row], Sequence[Row]]] = {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            metrics, held_out = runs[seed] = train(Path(folder), model, [f"run.seed={seed}"])
            seconds = time.monotonic() - began
        first, last = held_out[0], held_out[-1]
        for key, name in FIGURES.items():
            before, after = (
                f"{row[key]:.3f} ({row[f'{key}/low']:.3f} .. {row[f'{key}/high']:.3f})"
                for row in (first, last)
            )
            yield f"seed {seed}  {name:<8}{before} -> {after}  {last[key] - first[key]:+.3f} of {last['size']} problems"
        statistic, length = (
            max(row[key] for row in metrics) for key in ("logprob_diff/statistic", "length/mean")
        )
        yield (
            f"seed {seed}  {len(metrics)} steps in {seconds:.0f} s with start and evaluations, {length:.1f} tokens a "
            f"response at most on average; largest parity statistic {statistic:.2f}"
        )
    draw(runs, ROOT / "docs" / "smollm2.png")


def draw(runs: Mapping[int, tuple[Sequence[Row], Sequence[Row]]], file: Path) -> None:
    """Reward of each step, and held-out accuracy with its 95% interval, of each seed."""
    matplotlib.use("Agg")
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True, layout="constrained")
    colours = ("#0b6bcb", "#c2410c", "#15803d", "#7e22ce")
    for number, ((seed, (metrics, held_out)), colour) in enumerate(
        zip(runs.items(), colours, strict=False)
    ):
        panels[0].plot(
            [row["step"] + 1 for row in metrics],
            [row["reward/mean"] for row in metrics],
            color=colour,
        )
        for panel, key in zip(panels[1:], FIGURES, strict=True):
            # bars beside each other
            steps = [row["step"] + 0.3 * (number - (len(runs) - 1) / 2) for row in held_out]
            values = [row[key] for row in held_out]
            errors = [
                [abs(row[f"{key}/{end}"] - row[key]) for row in held_out] for end in ("low", "high")
            ]
            panel.errorbar(
                steps, values, errors, color=colour, marker="o", capsize=3, label=f"seed {seed}"
            )
    titles = (
        "reward of the samples trained on",
        *(f"256 held-out problems, {name}" for name in FIGURES.values()),
    )
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("step")
        panel.set_ylim(0, 1)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[2].legend(frameon=False)
    figure.suptitle(
        "SmolLM2-135M-Instruct, addition of two numbers, GRPO, two CPU cores", fontsize=11
    )
    figure.savefig(file, dpi=110)


def layouts(model: Path) -> Iterator[str]:
    cases = {f"fp32 {name}": keys.split() for name, keys in LAYOUTS.items()} | {
        "bf16 one process": ["train.dtype=bf16"]
    }
    first: Row = {}
    for name, keys in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            ((row, *_), _) = train(Path(folder), model, [*FIRST_STEP.split(), *keys])
        first = first or row
        same = "same" if row["rollout/digest"] == first["rollout/digest"] else "other"
        line = (
            f"{name:<18}loss {row['loss']:.9f}  gradient norm {row['grad_norm']:.7f}  {same} samples  "
            f"statistic {row['logprob_diff/statistic']:.2f}"
        )
        if not name.startswith("fp32"):
            yield line
            continue
        off = {key: abs(row[key] - first[key]) / abs(first[key]) for key in TOLERANCE}
        yield f"{line}  from one process {off['loss']:.1e}, {off['grad_norm']:.1e}"
        if same != "same" or any(off[key] > most for key, most in TOLERANCE.items()):
            raise SystemExit(f"{name} differs from one process: {off}, {same} samples")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smollm2", description=__doc__)
    parser.add_argument(
        "model", metavar="MODEL", type=Path, help="the folder that scripts/make_smollm2.py made"
    )
    parser.add_argument("--seeds", metavar="N", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", choices=("seeds", "layouts"))
    args = parser.parse_args()
    for part, lines in (("seeds", learn(args.model, args.seeds)), ("layouts", layouts(args.model))):
        if args.only not in (None, part):
            continue
        written = [
            f"$ python -m benchmarks.smollm2 MODEL --only {part}",
            f"date      {time.strftime('%Y-%m-%d', time.gmtime())}",
        ]
        written += [f"versions  {versions()}", ""]
        for line in lines:
            print(line, flush=True)
            written.append(line)
        (RESULTS / f"smollm2_{part}.txt").write_text("\n".join([*written, ""]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
