"""The engine's table: where a rank of vLLM keeps weights, and the error for loaders that differ."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

from megarl.layout import Fleet, Layout, Parallel
from megarl.models.engine import engine_table
from megarl.models.registry import read_model
from megarl.models.shards import ShardSlice, first_mismatch, slices_of

MODELS = Path(__file__).resolve().parents[3] / "configs" / "models"


def engine_layout(*, tensor: int, expert: int = 1, rank: int = 0) -> Layout:
    ranks = max(tensor, expert)
    fleet = Fleet(Parallel(), 1, tensor, ranks, 1, expert=expert, is_split=False)
    return fleet.engine_layout(rank)


def slices(name: str, *, layers: int = 1, **place: int) -> dict[str, list[ShardSlice]]:
    """Of the first layers of a large model, by parameter."""
    shape = replace(read_model(MODELS / name), layers=layers)
    by_param: dict[str, list[ShardSlice]] = {}
    for part in slices_of(engine_table(shape), shape, engine_layout(**place)):
        by_param.setdefault(part.param, []).append(part)
    return by_param


def test_key_values_are_repeated_where_the_engine_has_more_ranks_than_heads() -> None:
    parts = [
        slices("qwen3_235b_a22b", tensor=8, rank=rank)["model.layers.0.self_attn.qkv_proj.weight"]
        for rank in (2, 3)
    ]
    for (
        q,
        k,
        v,
    ) in parts:  # 64 heads of 128 on 8 ranks, 4 key-value heads: ranks 2 and 3 share the second
        assert (q.shape, k.shape, v.shape) == ((1024, 4096), (128, 4096), (128, 4096))
        assert (k.start, v.start) == ((128, 0), (128, 0))
        assert (q.offset, k.offset, v.offset) == (0, 1024 * 4096, 1152 * 4096)
    assert [q.start[0] for q, _, _ in parts] == [2048, 3072]


def test_vocabulary_is_padded_to_64() -> None:
    last = slices("llama_3_1_405b", tensor=16, rank=15)["lm_head.weight"]
    assert [(part.start, part.shape) for part in last] == [((120240, 0), (8016, 16384))]
    shape = replace(read_model(MODELS / "llama_3_1_405b"), layers=1, vocab=70)
    rows = [
        sum(
            b.shape[0]
            for b in slices_of(engine_table(shape), shape, engine_layout(tensor=4, rank=r))
            if b.param == "lm_head.weight"
        )
        for r in range(4)
    ]
    assert rows == [32, 32, 6, 0]


def test_experts_lie_one_after_another() -> None:
    at = slices("deepseek_v3", layers=4, tensor=32, rank=1)
    assert at["model.layers.0.mlp.gate_up_proj.weight"][0].shape == (576, 7168), (
        "leading layers are dense"
    )
    w13 = at["model.layers.3.mlp.experts.routed_experts.w13_weight"]
    assert [part.name.split(".")[-2] for part in w13[:2]] == ["gate_proj", "up_proj"]
    assert (w13[2].offset, w13[3].offset) == (128 * 7168, 192 * 7168)
    assert len(w13) == 2 * 256
    own = slices("deepseek_v3", layers=4, tensor=1, expert=32, rank=5)[
        "model.layers.3.mlp.experts.routed_experts.w13_weight"
    ]
    assert sum(prod(part.shape) for part in own) == 8 * 2 * 2048 * 7168, "8 whole experts"
    assert own[0].name == "model.layers.3.mlp.experts.40.gate_proj.weight"


def test_loaders_that_differ_are_named() -> None:
    table = [part for parts in slices("gpt_oss_120b", tensor=8, rank=3).values() for part in parts]
    padding = ShardSlice("lm_head.weight", (201088, 0), (0, 2880), "lm_head.weight", 0, (2880, 1))
    assert first_mismatch(table, [*reversed(table), padding]) is None

    moved = [
        replace(part, offset=part.offset + 8) if "k_proj.weight" in part.name else part
        for part in table
    ]
    message = first_mismatch(table, moved) or ""
    assert "model.layers.0.self_attn.k_proj.weight (192, 0) to (256, 2880) at element" in message
    assert "of model.layers.0.attn.qkv_proj.weight" in message
    lost = [part for part in table if not part.name.endswith("sinks")]
    assert "sinks" in (first_mismatch(table, lost) or "")


def test_tensors_of_pairs_are_recorded_as_columns() -> None:
    """vLLM's loader cuts the last dim of gate_up_proj; the table sees it as pairs."""
    table = [part for parts in slices("gpt_oss_120b", tensor=8, rank=3).values() for part in parts]
    flat = [
        replace(
            part,
            start=(*part.start[:-2], 2 * part.start[-2]),
            shape=(*part.shape[:-2], 2 * part.shape[-2]),
            strides=(*part.strides[:-2], part.strides[-1]),
        )
        if "gate_up_proj" in part.name
        else part
        for part in table
    ]  # fmt: skip
    assert any(a != b for a, b in zip(table, flat, strict=True))
    assert first_mismatch(table, flat) is None


def test_a_bias_that_is_added_once_is_kept_once() -> None:
    """vLLM sums the experts' down projections over tensor ranks."""
    param = "model.layers.0.mlp.experts.routed_experts.w2_bias"
    assert len(slices("gpt_oss_120b", tensor=8, rank=0)[param]) == 128
    assert param not in slices("gpt_oss_120b", tensor=8, rank=3)
