"""The smallest cases of `python -m benchmarks ranks512`."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.ranks512 import CASES, MEMBERS, WORLD, one_rank


def test_real_ranks_receive_each_byte_once():
    """Three replicas of three: a ring that has a direction, and a chain that passes on."""
    arguments = json.dumps({"world": 9, "members": 3, "samples": 8, "tokens": 64})
    command = [sys.executable, "-m", "benchmarks.ranks512", "exchange", arguments]
    figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert figures["received_over_samples"] == 1.0 < figures["padded_all_gather_over_samples"] / 2


def test_one_rank_holds_what_its_world_sampled():
    figures = one_rank(replicas=3, samples=8, tokens=64)
    assert (figures["ranks"], figures["samples"]) == (3 * MEMBERS, 24)
    assert (
        figures["computed: received_mb"]
        < figures["sample_mb"]
        < figures["computed: padded_all_gather_mb"]
    )
    (full,) = [arguments for name, arguments in CASES if name == "one_rank"]
    assert full["replicas"] * MEMBERS == WORLD == 512
