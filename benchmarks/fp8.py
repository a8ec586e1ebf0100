"""FP8 rollouts and emulated FP8 training beside bf16: curves of a quickstart-sized model, and errors of gradients.

python -m benchmarks.fp8 learning [STEPS] [SEEDS]   -> benchmarks/results/fp8_learning.{txt,png}
python -m benchmarks.fp8 gradients [DRAWS] [ROWS]   -> benchmarks/results/fp8_gradients.{txt,png}

`learning` samples from a model of configs/quickstart_sft.yaml's size, at random, and rewards even tokens: what it
learns in a few steps does not hide behind a phase of fine-tuning.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
RESULTS = HERE / "benchmarks" / "results"
MODEL = "{family: qwen3, layers: 3, hidden: 128, heads: 4, kv_heads: 2, vocab: 67, tokenizer: none, tied: true}"
COMMON = [f"model.create={MODEL}", "train.dtype=bf16", "train.lr=1e-3", "algorithm.preset=grpo"]
VARIANTS = {
    "bf16": [],
    "FP8 rollout": ["rollout.quantization=fp8"],
    "FP8 rollout, tis": ["rollout.quantization=fp8", "algorithm.correction=tis"],
    "FP8 training": ["precision.fp8={recipe: blockwise, emulate: true}"],
}
SHOWN = ("reward/mean", "logprob_diff/mean", "kl/rollout", "time/step")


def run(folder: Path, name: str, values: list[str]) -> list[dict[str, float]]:
    options = [f"run.dir={folder}", f"run.name={name}", *COMMON, *values]
    command = [sys.executable, "-m", "megarl.cli", "train", "configs/tiny_dense.yaml", *options]
    subprocess.run(command, cwd=HERE, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def learning(steps: int = 30, seeds: int = 3) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    lines = [
        f"a 3-layer model of 128, {steps} steps of 64 samples, seeds 1 to {seeds}; share of even tokens",
        "",
    ]
    lines.append(
        f"{'':18}{'first':>8}{'last 5 steps, by seed':>26}{'mean |diff|':>14}{'kl':>10}{'s/step':>8}"
    )
    with tempfile.TemporaryDirectory() as temporary:
        for variant, values in VARIANTS.items():
            name = re.sub(r"\W", "_", variant)
            options = [*values, f"train.steps={steps}"]
            runs = [
                run(Path(temporary), f"{name}_{seed}", [*options, f"run.seed={seed}"])
                for seed in range(1, seeds + 1)
            ]
            rewards = [[row["reward/mean"] for row in rows] for rows in runs]
            columns = list(zip(*rewards, strict=True))
            axes.plot([statistics.mean(column) for column in columns], label=variant)
            axes.fill_between(range(steps), [*map(min, columns)], [*map(max, columns)], alpha=0.2)
            ends = "  ".join(f"{statistics.mean(reward[-5:]):.3f}" for reward in rewards)
            means = [statistics.mean(row[key] for rows in runs for row in rows) for key in SHOWN]
            first = statistics.mean(columns[0])
            lines.append(
                f"{variant:18}{first:8.3f}{ends:>26}{means[1]:14.4f}{means[2]:10.5f}{means[3]:8.2f}"
            )
            print(lines[-1], flush=True)
    axes.set(xlabel="step", ylabel="reward (mean; band: least and most of the seeds)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "fp8_learning.png", dpi=110)
    (RESULTS / "fp8_learning.txt").write_text("\n".join([*lines, ""]))


def gradients(draws: int = 32, rows: int = 64) -> None:
    """The gradient of one batch under emulated FP8 against fp32, and what the format's epsilon predicts: the same model
    whose operands are not rounded, but get errors drawn from all that such a rounding could make."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    sys.path += [str(HERE / "tests" / "unit" / "trainer"), str(HERE / "tests" / "dist")]
    import numpy as np
    import torch.distributed as dist
    from test_fp8 import by_layer, relative_errors

    from megarl.config.precision import Fp8

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sizes = {
        "hidden": 256,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "intermediate": 512,
        "layers": 8,
    }
    experts = {
        "family": "qwen3_moe",
        "experts": 4,
        "experts_per_token": 2,
        "moe_intermediate": 256,
        "layers": 4,
    }
    lines = [
        f"||g_fp8 - g_fp32|| / ||g_fp32|| by layer, median of the linear layers' weights; {rows} rows; predicted: "
    ]
    lines[0] += f"least and most of {draws} draws"
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4))
    for case, create, axes in zip(
        ("dense", "experts"), (sizes, sizes | experts), panels, strict=True
    ):
        for color, recipe in enumerate(("blockwise", "mxfp8", "tensorwise")):
            with tempfile.TemporaryDirectory() as folder:
                fp8 = Fp8(recipe=recipe, emulate=True)
                errors = [
                    by_layer(each)
                    for each in relative_errors(Path(folder), create, fp8, draws=draws, rows=rows)
                ]
            found, least, most = errors[0], np.min(errors[1:], axis=0), np.max(errors[1:], axis=0)
            axes.plot(found, marker="o", color=f"C{color}", label=recipe)
            axes.fill_between(
                range(len(found)),
                least,
                most,
                color=f"C{color}",
                alpha=0.25,
                label=f"{recipe}, predicted",
            )
            for name, values in ((f"{case}, {recipe}", found), ("  predicted", least), ("", most)):
                lines.append(f"{name:20}" + " ".join(f"{value:.3f}" for value in values))
            print("\n".join(lines[-3:]), flush=True)
        axes.set(xlabel="layer", title=case, ylim=(0, 0.4), xticks=range(len(found)))
    panels[0].set_ylabel("relative error of the gradient")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "fp8_gradients.png", dpi=110)
    (RESULTS / "fp8_gradients.txt").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    if sys.argv[1] == "learning":
        learning(*map(int, sys.argv[2:]))
    else:
        gradients(*map(int, sys.argv[2:]))
