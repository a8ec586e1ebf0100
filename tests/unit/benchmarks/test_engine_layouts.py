"""The table of the documentation is the one that the benchmark computes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.engine_layouts import ROOT, cache_of, cache_table
from megarl.models.registry import read_model

PAGE = Path(__file__).parents[3] / "docs/guides/engine_layouts.md"


def test_the_page_has_the_table() -> None:
    assert cache_table() in PAGE.read_text(encoding="utf-8")


def test_sizes_by_hand() -> None:
    """Qwen3-235B-A22B: 94 layers of 4096, 64 heads, 4 KV heads of 128, 128 experts of 1536, vocabulary 151936."""
    shape = read_model(ROOT / "configs/models/qwen3_235b_a22b")
    cache = cache_of(shape, "none", 4, 16, 64)
    attention = (
        4096 * 128 * (64 + 4 + 4 + 64) // 4 + 2 * 128
    )  # q, k, v, o of a tensor rank, and two norms
    layer = (
        attention + 2 * 4096 + 128 * 4096 + 2 * 3 * 4096 * 1536
    )  # norms, router, 2 of 128 experts
    ends = 2 * 4096 * 151936 // 4 + 4096
    assert cache.weights == 2 * (94 * layer + ends)
    assert cache.per_token == 2 * 94 * 128 * 2
    free = 0.88 * 80e9 - 3e9 - cache.weights
    assert cache.tokens == 16 * int(free / cache.per_token)
