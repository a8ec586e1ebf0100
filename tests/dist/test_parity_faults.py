"""Faults planted between a real engine and a real trainer: each is refused by a wide margin, and called by its name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.platform.env import child_env

ROOT = Path(__file__).resolve().parents[2]
FAULTS = {
    "stale head",
    "swapped experts",
    "one norm, the last",
    "one norm, of a layer",
    "one layer of older weights",
    "padded vocabulary in the softmax",
    "temperature 0.9 for 1.0",
}


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("tiny_moe", "bf16"),
        pytest.param("tiny_dense", "fp32", marks=[pytest.mark.long, pytest.mark.exhaustive]),
    ],
)
def test_each_planted_fault_is_refused_and_named(model: str, dtype: str) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.parity",
        "--faults",
        f"configs/{model}.yaml",
        f"train.dtype={dtype}",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=child_env()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(
        "\n".join(
            f"{each['ratio']:.3g} {each['fault']} ({each['size']}): {each['cause']}"
            for each in found
        )
    )
    assert {each["fault"] for each in found} == FAULTS - (
        {"swapped experts"} if model == "tiny_dense" else set()
    )
    assert not [each for each in found if each["ratio"] < each["at_least"] or not each["is_named"]]
