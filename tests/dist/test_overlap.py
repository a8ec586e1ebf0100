"""Overlapped reduction of gradients changes no bit, and buckets only the order of sums over more than two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "models",
    [
        ["qwen3@5"],
        pytest.param(["qwen3", "qwen3_moe", "qwen3_untied"], marks=pytest.mark.exhaustive),
    ],
)
def test_overlap_and_buckets(tmp_path, models):
    results = tmp_path / "results.json"
    script = Path(__file__).with_name("overlap_ranks.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, results, *models],
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(results.read_text())["overlap"]
    assert [case["model"] for case in found] == models
    for case in found:
        plain, name = case["plain"], f"{case['model']} {case['parallel']}"
        assert plain["grad_norm"][0] > 1e-3 and plain["loss"][0] != plain["loss"][2], name
        assert case["overlap"] == plain, f"{name}: no bit differs"
        assert case["kept outputs"] == plain, f"{name}: no bit differs"
        buckets = case["buckets"]
        assert buckets["buckets"] > plain["buckets"] and not buckets["replicas_differ"], name
        for key in (
            "grad_norm",
            "loss",
        ):  # of the later updates, Adam has divided small gradients by each other
            assert buckets[key][0] == pytest.approx(plain[key][0], rel=1e-6), name
            assert buckets[key] == pytest.approx(plain[key], rel=1e-5), name
        if case["parallel"]:  # two ranks to sum over: no order
            assert (buckets["weights"], buckets["loss"]) == (plain["weights"], plain["loss"]), name
