"""FLOPs of the model against counts by hand, and the peaks of GPUs by the names that drivers report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.models.flops import PEAKS, forward_flops, peak_flops, update_flops
from megarl.models.shape import DENSE, EXPERTS, LatentSizes, LayerKind, ModelShape

COMMON = {"tied": True, "rms_eps": 1e-6, "rope_theta": 1e4, "max_position": 64}
# 2 layers; hidden 8; 4 heads and 2 key-value heads of 6
GQA = ModelShape(
    "qwen3",
    layers=2,
    hidden=8,
    heads=4,
    kv_heads=2,
    head_dim=6,
    intermediate=20,
    vocab=50,
    **COMMON,
)
# the first of 2 layers is dense, the second has 8 experts; 2 are chosen
MOE = ModelShape(
    "glm4_moe", layers=2, hidden=8, heads=4, kv_heads=4, head_dim=2, intermediate=20, vocab=50,
    experts=8, experts_per_token=2, moe_intermediate=5, shared_intermediate=3,
    kinds=(DENSE, EXPERTS), **COMMON,
)  # fmt: skip
LATENT = ModelShape(
    "deepseek_v3", layers=1, hidden=8, heads=2, kv_heads=2, head_dim=7, intermediate=20, vocab=50,
    latent=LatentSizes(q_lora_rank=5, kv_lora_rank=3, qk_nope_head_dim=4, qk_rope_head_dim=3, v_head_dim=6),
    **COMMON,
)  # fmt: skip


def test_a_dense_model_by_hand() -> None:
    # a token: q 8 x 24, k and v 8 x 12 each, o 24 x 8, MLP 3 x 8 x 20 = 1056 weights in each of 2 layers, and
    # the head's 8 x 50; 2 FLOPs a weight
    token = 2 * (2 * (192 + 96 + 96 + 192 + 480) + 400)
    assert token == 5024
    # rows of 3 and 1 tokens: 1 + 2 + 3 and 1 pairs; 4 heads, 6 of a query and 6 of a value, 2 FLOPs, 2 layers
    assert forward_flops(GQA, [3, 1], outputs=50) == 4 * 5024 + 7 * 4 * (6 + 6) * 2 * 2 == 21440
    assert update_flops(GQA, [3, 1], outputs=50) == 3 * 21440
    assert update_flops(GQA, [3, 1], outputs=50, is_partial=True) == 2 * 21440
    # one output per token instead of the vocabulary
    assert forward_flops(GQA, [3, 1], outputs=1) == 21440 - 4 * 2 * 8 * 49


def test_experts_by_hand() -> None:
    # attention: 4 x 8 x 8 weights a layer; MLP: 3 x 8 x 20, then the router's 8 x 8, two experts and the shared ones
    first = 256 + 480
    second = 256 + 64 + 3 * 8 * (2 * 5 + 3)
    pairs = (1 + 2 + 3 + 4) * 4 * (2 + 2) * 2
    assert (
        forward_flops(MOE, [4], outputs=50) == 4 * 2 * (first + second + 400) + 2 * pairs == 14784
    )


def test_latent_attention_by_hand() -> None:
    # queries 8 x 5 and 5 x 2 x 7, keys and values 8 x (3 + 3) and 3 x 2 x (4 + 6), out 2 x 6 x 8; MLP; head
    weights = 40 + 70 + 48 + 60 + 96 + 480 + 400
    pairs = (1 + 2) * 2 * (7 + 6) * 2
    assert forward_flops(LATENT, [2], outputs=50) == 2 * 2 * weights + pairs == 4932


def test_a_window_bounds_what_a_token_attends_to() -> None:
    windowed = replace(GQA, sliding_window=2)
    less = forward_flops(GQA, [5], outputs=50) - forward_flops(windowed, [5], outputs=50)
    # in the first of two layers 1 + 2 + 2 + 2 + 2 pairs instead of 15
    assert less == (15 - 9) * 4 * 12 * 2


def test_layers_that_are_not_attention_are_not_counted() -> None:
    other = replace(GQA, kinds=(LayerKind("other", is_attention=False), DENSE))
    assert update_flops(other, [3], outputs=50) == 0


@pytest.mark.parametrize(
    ("gpu", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H200", "fp8", 1979),
        ("NVIDIA H20", "bf16", 148),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA A100-SXM4-80GB", "fp8", 0),
        ("NVIDIA GeForce GTX 1080", "bf16", 0),
        ("", "fp32", 0),
    ],
)
def test_peaks(gpu: str, dtype: str, tflops: float) -> None:
    assert peak_flops(gpu, dtype) == tflops * 1e12


def test_no_row_of_the_table_hides_another() -> None:
    names = [row.rsplit(maxsplit=3)[0].strip() for row in PEAKS.strip().splitlines()[1:]]
    for name in names:
        first = next(other for other in names if other in name)
        assert first == name, f"{first} would apply to {name}"
