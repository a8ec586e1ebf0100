"""A sync launches few kernels: pieces are copied, summed and compared in batches (benchmarks/launches.py)."""

from __future__ import annotations

from benchmarks.launches import measure


def test_launches_of_a_sync() -> None:
    """Between ranks and within one; of 5.2 MB a piece, and a kernel copies at most 42 MB."""
    found = measure("Qwen3-8B on 8", "rollout.tensor=4")
    pieces, launches, waits = found["pieces"], found["launches"], found["waits"]
    assert pieces == {"packed": 715, "written": 525}
    assert launches.total() < 0.7 * pieces.total(), launches
    assert launches["cumsum"] >= waits.pop("rounds") > 4, "checksums of every round"
    assert waits.total() <= 11, waits
