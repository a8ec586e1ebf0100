"""The algorithms side by side: from one SFT model, on the quickstart's task, at equal numbers of sampled tokens.

    python -m benchmarks algorithms [--rounds SEEDS] [--only NAME] [--json FILE]         about 25 minutes on two cores

Every run has configs/quickstart.yaml's model, task, learning rate, 512 samples a step and layout, and KL to the SFT
model with coefficient 0.001 where its paper puts it. ppo and reinforce_pp draw one sample of each of 512 prompts, the
others 8 of each of 64. grpo_process also sees which digits are right, which the others do not. ppo's critic learns
alone in the first steps, which count. Curves end at the largest number of sampled tokens that every run reached.

With all algorithms, writes benchmarks/results/algorithms.{txt,png}. FILE is written after each run; runs that it holds
are not repeated.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from operator import lt
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot as plt

from benchmarks.exhaustive import RESULTS, ROOT, versions
from benchmarks.table import machine
from megarl.telemetry.metrics import read_metrics

STEPS = 80  # a third of the quickstart's
TAIL = 0.25  # of the tokens: the last part, whose mean and steadiness are stated
SINGLE = ["rollout.samples_per_prompt=1", "train.prompts_per_step=512"]
KL_LOSS = {"estimator": "k3", "where": "loss", "coef": 0.001}  # DeepSeekMath's
DIGITS = {
    "name": "process",
    "options": {
        "splitter": "regex",
        "pattern": "[0-9]",
        "scorer": "benchmarks.algorithms:right_so_far",
    },
}
# what differs from the quickstart; `filter_zero_std` is off, so that all see the same number of samples
ALGORITHMS: dict[str, list[str]] = {
    "ppo": [*SINGLE, "critic.lr=2.0e-3", "critic.warmup_steps=5"],
    "reinforce_pp": SINGLE,
    "reinforce_pp_baseline": [],
    "rloo": [],
    "grpo": [f"algorithm.kl={json.dumps(KL_LOSS)}"],
    "grpo_process": [
        f"algorithm.kl={json.dumps(KL_LOSS)}",
        "algorithm.advantage=grpo_process",
        f"rewards={json.dumps([DIGITS, {'name': 'accuracy', 'weight': 1.0}])}",
    ],
    "dr_grpo": [f"algorithm.kl={json.dumps(KL_LOSS)}"],
}
COLOURS = ("#0b6bcb", "#c2410c", "#eab308", "#15803d", "#111827", "#7e22ce", "#db2777")
Row = Mapping[str, Any]


def right_so_far(prompt: str, steps: Sequence[str], answer: str, **_: Any) -> list[float]:
    """1 for each digit up to which the response is the beginning of the answer."""
    texts = ["".join(steps[: count + 1]).strip() for count in range(len(steps))]
    return [float(answer.startswith(text)) for text in texts]


def train(config: str, folder: Path, name: str, *keys: str) -> Path:
    """Trains in a fresh process; returns the folder of the run."""
    command = [sys.executable, "-m", "megarl.cli", "train", f"configs/{config}.yaml"]
    subprocess.run(
        [*command, f"run.dir={folder}", f"run.name={name}", *keys],
        cwd=ROOT,
        check=True,
        stdout=sys.stderr,
    )
    return folder / name


def measure(name: str, seed: int, model: Path, folder: Path, *keys: str) -> dict[str, Any]:
    kl = (
        ["algorithm.kl.coef=0.001"]
        if name in ("ppo", "reinforce_pp", "reinforce_pp_baseline", "rloo")
        else []
    )
    preset = "grpo" if name == "grpo_process" else name
    run = train(
        "quickstart",
        folder,
        f"{name}-{seed}",
        f"model.path={model}",
        f"run.seed={seed}",
        f"algorithm.preset={preset}",
        f"train.steps={STEPS}",
        "checkpoint.export_hf=never",
        *kl,
        *ALGORITHMS[name],
        *keys,
    )
    return read(run, name, seed)


def read(run: Path, name: str, seed: int) -> dict[str, Any]:
    """One run: its curves over sampled tokens, held-out accuracy, seconds and peak memory."""
    rows, held_out = read_metrics(run / "metrics.jsonl"), read_metrics(run / "eval.jsonl")
    steps = [row for row in rows if row["length/mean"] is not None]
    tokens = np.cumsum([row["length/mean"] * row["samples/count"] for row in steps])
    peaks = [
        row[key]
        for row in rows
        for key in row
        if key.startswith("memory/") and row[key] is not None
    ]
    return {
        "algorithm": name,
        "seed": seed,
        "tokens": tokens.tolist(),
        "reward": [row["reward/accuracy/mean"] for row in steps],
        "kl": [row.get("kl/ref") or 0.0 for row in steps],
        "length": [row["length/mean"] for row in steps],
        "held_out": [row["sampled_accuracy"] for row in held_out],
        "step_s": float(np.median([row["time/step"] for row in steps])),
        "wall_s": sum(row["time/step"] for row in steps),
        "peak_gb": max(peaks),
    }


def curves(runs: Sequence[Row], key: str, grid: np.ndarray) -> np.ndarray:
    """[seeds, points]: the mean of `key` over the 5 steps up to each number of sampled tokens."""
    smooth = [
        np.convolve(np.pad(run[key], (4, 0), "edge"), np.full(5, 0.2), "valid") for run in runs
    ]
    return np.stack(
        [np.interp(grid, run["tokens"], values) for run, values in zip(runs, smooth, strict=True)]
    )


def tail_of(run: Row, end: float) -> list[int]:
    """The steps of the last part of the tokens."""
    return [i for i, t in enumerate(run["tokens"]) if end * (1 - TAIL) < t <= end]


def jitter_of(run: Row, end: float) -> float:
    return float(np.std(np.diff([run["reward"][i] for i in tail_of(run, end)])))


def findings(by_name: Mapping[str, Sequence[Row]], end: float) -> Iterator[str]:
    """What REINFORCE++ is said to be: in how many seeds it is, of which each has run all algorithms in turn.

    Steadiness is compared where the prompts of a step are the same. The mean of one sample of each of n prompts wavers
    by (2 p (1 - p) / n)^0.5 from step to step by sampling alone, that of 8 samples of n / 8 prompts by more.
    """
    claims = (("reinforce_pp_baseline", "steadier than", "grpo", "jitter"),)
    claims += tuple(
        (name, "faster than", "ppo", "ms a token")
        for name in ("reinforce_pp", "reinforce_pp_baseline")
    )
    for name, claim, other, what in claims:
        if name not in by_name or other not in by_name:
            continue
        ours, theirs = (
            [
                jitter_of(run, end) if what == "jitter" else 1e3 * run["wall_s"] / run["tokens"][-1]
                for run in by_name[of]
            ]
            for of in (name, other)
        )
        holds = f"in {sum(map(lt, ours, theirs))} of {len(ours)} seeds"
        spans = [f"{min(values):.3f}-{max(values):.3f}" for values in (ours, theirs)]
        yield f"{name} {claim} {other}: {holds}; {what} {spans[0]} against {spans[1]}"


def summary(by_name: Mapping[str, Sequence[Row]], end: float) -> Iterator[str]:
    """A line an algorithm: means over the seeds, in brackets the least and the most of them."""
    yield (
        f"{'':<23}{'reward':>20}{'to 0.7':>8}{'jitter':>8}{'KL':>20}{'length':>8}{'held-out sampled':>26}"
        f"{'step s':>8}{'run s':>7}{'GB':>7}"
    )

    def span(values: Sequence[float]) -> str:
        return f"{np.mean(values):.3f} ({min(values):.3f}-{max(values):.3f})"

    for name, runs in by_name.items():
        kept = [tail_of(run, end) for run in runs]
        tail = {
            key: [
                float(np.mean([run[key][i] for i in at]))
                for run, at in zip(runs, kept, strict=True)
            ]
            for key in ("reward", "kl", "length")
        }
        jitter = [jitter_of(run, end) for run in runs]
        smooth = curves(runs, "reward", np.linspace(0, end, 400))
        reached = [
            np.linspace(0, end, 400)[np.argmax(row >= 0.7)] if row.max() >= 0.7 else np.inf
            for row in smooth
        ]
        before, after = ([run["held_out"][at] for run in runs] for at in (0, -1))
        yield (
            f"{name:<23}{span(tail['reward']):>20}{np.mean(reached) / 1e3:>7.0f}k{np.mean(jitter):>8.4f}"
            f"{span(tail['kl']):>20}{np.mean(tail['length']):>8.2f}{np.mean(before):>7.3f} -> {span(after)}"
            f"{min(run['step_s'] for run in runs):>8.2f}{min(run['wall_s'] for run in runs):>7.0f}"
            f"{np.mean([run['peak_gb'] for run in runs]):>7.2f}"
        )


def draw(by_name: Mapping[str, Sequence[Row]], end: float, file: Path) -> None:
    matplotlib.use("Agg")
    figure, panels = plt.subplots(2, 2, figsize=(11, 7.4), layout="constrained")
    grid = np.linspace(min(run["tokens"][0] for runs in by_name.values() for run in runs), end, 200)
    labels = {
        "reward": "share of right samples",
        "kl": "KL to the SFT model (nats a token)",
        "length": "tokens a sample",
    }
    for colour, (name, runs) in zip(COLOURS, by_name.items(), strict=False):
        of = {key: curves(runs, key, grid) for key in labels}
        for panel, key in zip((panels[0, 0], panels[1, 0], panels[1, 1]), labels, strict=True):
            panel.plot(grid / 1e3, of[key].mean(0), color=colour, label=name, linewidth=1.6)
            panel.fill_between(
                grid / 1e3, of[key].min(0), of[key].max(0), color=colour, alpha=0.12, linewidth=0
            )
        # means of a tenth of the tokens
        kl, reward = (of[key].reshape(-1, 10, 20).mean(2) for key in ("kl", "reward"))
        panels[0, 1].plot(kl.mean(0), reward.mean(0), color=colour, linewidth=1.2, marker=".")
        panels[0, 1].plot(kl[:, -1], reward[:, -1], "o", color=colour, markersize=5)
    for panel, key in zip((panels[0, 0], panels[1, 0], panels[1, 1]), labels, strict=True):
        panel.set(xlabel="sampled tokens, thousands", ylabel=labels[key])
    panels[0, 1].set_title(
        "each tenth of the tokens; circles: the last one of each seed", fontsize=9
    )
    panels[0, 1].set(xlabel=labels["kl"], ylabel=labels["reward"])
    for panel in panels.flat:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(frameon=False, fontsize=9)
    seeds = max(map(len, by_name.values()))
    figure.suptitle(
        f"Two-digit addition from one SFT model; mean and span of {seeds} seeds, means of 5 steps"
    )
    figure.savefig(file, dpi=110)


def compare(
    names: Sequence[str],
    seeds: Sequence[int],
    *keys: str,
    model: Path | None = None,
    file: Path | None = None,
) -> tuple[dict[str, list[Row]], float]:
    """Returns the runs of each algorithm, seed by seed in turn, and the sampled tokens that all of them reached."""
    runs: list[Row] = json.loads(file.read_text()) if file is not None and file.is_file() else []
    with tempfile.TemporaryDirectory() as folder:
        for seed, name in product(seeds, names):
            if not any((run["algorithm"], run["seed"]) == (name, seed) for run in runs):
                model = model or train("quickstart_sft", Path(folder), "sft") / "hf"
                runs.append(measure(name, seed, model, Path(folder), *keys))
            if file is not None:
                file.write_text(json.dumps(runs))
    by_name = {
        name: [run for run in runs if run["algorithm"] == name and run["seed"] in seeds]
        for name in names
    }
    return by_name, min(run["tokens"][-1] for runs in by_name.values() for run in runs)


def run(only: str, seeds: int, json_file: Path | None) -> None:
    names = [name for name in ALGORITHMS if only in name]
    if not names or seeds < 1:
        raise ValueError(
            f"--only={only!r} --rounds={seeds}: algorithms are {', '.join(ALGORITHMS)}, seeds at least 1"
        )
    before = machine()
    by_name, end = compare(names, range(1, seeds + 1), file=json_file)
    text = "\n".join(
        [
            "$ python -m benchmarks algorithms",
            f"date      {time.strftime('%Y-%m-%d', time.gmtime())}",
            f"versions  {versions()}",
            f"seeds     run.seed 1 to {seeds}; the SFT model: configs/quickstart_sft.yaml",
            f"load      {before['load']} before",
            "",
            f"{STEPS} steps a run, compared up to {end / 1e3:.0f}k sampled tokens; mean (least - most) of the seeds",
            *summary(by_name, end),
            "",
            *findings(by_name, end),
            "",
            f"reward, KL, length: of the samples trained on, over the last {TAIL:.0%} of the tokens; to 0.7: sampled",
            "tokens until the mean of 5 steps has reached 0.7; jitter: standard deviation of the reward's change from",
            "step to step there; step s, run s: median seconds of a step, and of all steps, of the fastest seed, since",
            "the machine is shared; GB: peak resident memory of a rank",
            "",
        ]
    )
    print(text)
    if len(names) == len(ALGORITHMS):
        (RESULTS / "algorithms.txt").write_text(text)
        draw(by_name, end, RESULTS / "algorithms.png")
