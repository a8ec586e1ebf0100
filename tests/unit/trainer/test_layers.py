"""The layer parts of our own, against plain attention and torch's norm."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from megarl.layout import Layout, Parallel
from megarl.trainer.layers import PackedAttention, RMSNorm, SinkAttention
from megarl.trainer.model import patch_chunk


def packed(*lengths: int) -> SimpleNamespace:
    return SimpleNamespace(cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0))


@pytest.mark.parametrize("lengths", [(7,), (1, 1, 1), (5, 1, 8, 3, 16, 2), (4, 4, 4)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_stays_in_its_row_and_is_causal(lengths: tuple[int, ...], kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    total, heads, dim = sum(lengths), 4, 6
    query, key, value = (
        torch.randn(total, count, dim, generator=generator, dtype=torch.float64).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )
    attention = PackedAttention(SimpleNamespace())
    out = attention(query, key, value, None, packed_seq_params=packed(*lengths))
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (row[:, None] == row[None]) & torch.ones(total, total).tril().bool()
    wide_key, wide_value = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, wide_key) / dim**0.5
    plain = torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), wide_value
    ).flatten(1)
    assert_close(out, plain)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    mine = torch.autograd.grad((out * weights).sum(), (query, key, value))
    assert_close(mine, torch.autograd.grad((plain * weights).sum(), (query, key, value)))


@pytest.mark.parametrize("layer", [1, 2])
def test_sinks_take_attention_away_and_odd_layers_see_a_window(layer: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths, heads, dim, window = (7, 3), 4, 6, 3
    query, key, value = (
        torch.randn(sum(lengths), count, dim, generator=generator).requires_grad_()
        for count in (heads, 2, 2)
    )
    config = SimpleNamespace(
        num_attention_heads=heads,
        tensor_model_parallel_size=1,
        params_dtype=torch.float32,
        window_size=(window - 1, 0),
        window_attn_skip_freq=2,
    )
    attention = SinkAttention(config, layer, softmax_scale=0.3)
    attention.softmax_offset.data = torch.randn(heads, generator=generator)
    out = attention(query, key, value, None, packed_seq_params=packed(*lengths))
    place = torch.cat([torch.arange(length) for length in lengths])
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    back = place[:, None] - place[None]
    seen = (
        (row[:, None] == row[None])
        & (back >= 0)
        & (back < (window if layer == 1 else sum(lengths)))
    )
    wide_key, wide_value = (x.repeat_interleave(heads // 2, 1) for x in (key, value))
    weights = (torch.einsum("qhd,khd->hqk", query, wide_key) * 0.3).exp() * seen
    weights = weights / (
        weights.sum(-1, keepdim=True) + attention.softmax_offset.exp()[:, None, None]
    )
    plain = torch.einsum("hqk,khd->qhd", weights, wide_value).flatten(1)
    assert_close(out, plain)
    gradients = [
        torch.autograd.grad(x.square().sum(), attention.softmax_offset, retain_graph=True)
        for x in (out, plain)
    ]
    assert_close(*gradients)


def test_norm() -> None:
    config = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=True)
    norm = RMSNorm(config, 8, eps=1e-6)
    norm.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(3, 8)
    assert_close(norm(x), torch.nn.functional.rms_norm(x, (8,), norm.weight, 1e-6))
    assert norm.weight.sequence_parallel


def test_gradient_norms_count_the_sinks_of_all_tensor_ranks() -> None:
    """Megatron counts an unmarked parameter on the first tensor rank only, and Transformer Engine marks no sinks."""
    attention = torch.nn.Module()
    attention.softmax_offset = torch.nn.Parameter(torch.zeros(2))
    attention.norm = torch.nn.Parameter(torch.zeros(2))
    chunk = torch.nn.Module()
    chunk.core_attention = attention
    chunk.config = SimpleNamespace(params_dtype=torch.bfloat16)
    chunk.post_process = False
    patch_chunk(chunk, Layout.of(Parallel(), 1, 0))
    assert attention.softmax_offset.tensor_model_parallel
    assert not hasattr(attention.norm, "tensor_model_parallel")
