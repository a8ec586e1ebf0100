"""Runs that are killed with -9 again and again, whatever they are doing, and started again until they are done.

python tests/e2e/kills.py FOLDER SEED KILLS CONFIG [key=value ...]      prints each kill; exit 0 when bits are equal
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
START_S = 25.0  # one kill in five comes within this time of the start; the others within the second new step


def command(folder: Path, name: str, config: str, overrides: list[str]) -> list[str]:
    values = [f"run.dir={folder}", f"run.name={name}", "checkpoint.export_hf=end", *overrides]
    return [sys.executable, "-m", "megarl.cli", "train", config, *values]


def finish(folder: Path, name: str, config: str, overrides: list[str]) -> dict[str, torch.Tensor]:
    """The exported weights of a run that is left alone."""
    done = subprocess.run(
        command(folder, name, config, overrides), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr
    return load_file(folder / name / "hf" / "model.safetensors")


def kill_once(
    folder: Path, name: str, config: str, overrides: list[str], draw: random.Random
) -> str:
    """Start it and kill it; where it was. The victim is the launcher, or one rank."""
    metrics = folder / name / "metrics.jsonl"
    before = steps(metrics)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command(folder, name, config, overrides), cwd=ROOT, **quiet)
    began, part = time.monotonic(), draw.random()
    if draw.random() < 0.2:
        while (
            process.poll() is None
            and time.monotonic() < began + part * START_S
            and len(new(metrics, before)) < 2
        ):
            time.sleep(0.005)
    else:  # after two new steps, and a random part of the time that a step takes
        first = None
        while process.poll() is None and len(new(metrics, before)) < 2:
            first = first or (time.monotonic() if new(metrics, before) else None)
            time.sleep(0.005)
        time.sleep(part * (time.monotonic() - (first or began)))
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    children = [int(pid) for pid in ranks.read_text().split()] if ranks.exists() else []
    victim = draw.choice([process.pid, *children])
    if process.poll() is not None:
        return "too late: it had ended"
    writing = [path.name for path in (folder / name / "checkpoints").glob(".step_*.part")]
    os.kill(victim, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20  # the kernel ends the ranks of a launcher that is gone
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    last = max(map(int, steps(metrics)), default=-1)
    return f"{'launcher' if victim == process.pid else 'rank'} at step {last}, writing {writing or 'nothing'}"


def steps(metrics: Path) -> Counter[str]:
    if not metrics.exists():
        return Counter()
    lines = metrics.read_text().splitlines()
    return Counter(str(json.loads(line)["step"]) for line in lines if line.endswith("}"))


def new(metrics: Path, before: Counter[str]) -> Counter[str]:
    """Steps written since `before`; a resumed run takes some of them again."""
    return steps(metrics) - before


def balance(run: Path) -> None:
    """Where the run samples: megarl audit must find every prompt accounted for."""
    if not (run / "ledger.jsonl").exists():
        return
    done = subprocess.run(
        [sys.executable, "-m", "megarl.cli", "audit", run], cwd=ROOT, capture_output=True, text=True
    )
    print(f"  {' '.join(done.stdout.split())}", flush=True)
    assert done.returncode == 0, done.stderr


def main(folder: Path, seed: int, kills: int, config: str, overrides: list[str]) -> bool:
    whole = finish(folder, "whole", config, overrides)
    draw = random.Random(seed)
    for number in range(kills):
        print(
            f"kill {number + 1}: {kill_once(folder, 'killed', config, overrides, draw)}", flush=True
        )
        balance(folder / "killed")
    killed = finish(folder, "killed", config, overrides)
    balance(folder / "killed")
    kept = json.loads((folder / "killed" / "metrics.jsonl").read_text().splitlines()[0])["step"]
    equal = all(torch.equal(whole[name], killed[name]) for name in whole)
    print(f"bit-identical: {equal}; {len(whole)} tensors, metrics from step {kept}", flush=True)
    return equal


if __name__ == "__main__":
    into, seed, kills, config, *overrides = sys.argv[1:]
    sys.exit(not main(Path(into), int(seed), int(kills), config, overrides))
