"""Summarizes the quickstart: accuracy on held-out problems, before and after, as a table and summary.json.

runs/quickstart-sft-eval/eval.jsonl, runs/quickstart/eval.jsonl (first and last line) -> runs/quickstart/summary.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

RUNS = Path("runs")
FIGURES = {"accuracy": "greedy", "sampled_accuracy": "sampled"}


def main() -> None:
    parser = argparse.ArgumentParser()
    for part in ("install", "sft", "rl"):
        parser.add_argument(f"--{part}", type=int, required=True, metavar="SECONDS")
    seconds = vars(parser.parse_args())
    untrained = read(RUNS / "quickstart-sft-eval")[-1]
    after_sft, *_, after_rl = read(RUNS / "quickstart")
    stages = {"before_sft": untrained, "after_sft": after_sft, "after_rl": after_rl}
    summary = {
        figure: {stage: values[figure] for stage, values in stages.items()} for figure in FIGURES
    }
    file = RUNS / "quickstart" / "summary.json"
    file.write_text(json.dumps(summary | {"seconds": seconds}, indent=2) + "\n")

    print(f"\n{after_rl['size']} fresh problems   before SFT   after SFT   after GRPO")
    for figure, name in FIGURES.items():
        print(f"{name:<20}" + "".join(f"{value:>12.3f}" for value in summary[figure].values()))
    print(
        "seconds: "
        + ", ".join(f"{part} {value}" for part, value in seconds.items())
        + f"   ({file})"
    )


def read(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
