"""Where the host waits for the device, with a CPU that stands for both (tests/dist/host_syncs.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "dist"))
from host_syncs import measure

ROWS = 4
PERMUTATION = "transformer/moe/moe_utils.py"  # Megatron's without fusion; a GPU's is fused


@pytest.mark.parametrize("experts", [0, 4])
def test_no_microbatch_waits_for_the_device(one_rank, tmp_path, experts):
    """One step and one forward pass, a micro-batch per row: reads are of sums, once a step."""
    inside, outside = measure(tmp_path, num_rows=ROWS, experts=experts)
    repeated = {place: n for place, n in inside.items() if n >= ROWS and PERMUTATION not in place}
    assert not repeated
    assert outside.total() <= 3, outside
