"""FP8 weights against a reference that takes one block after another, and against arithmetic alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.models.shards import ShardSlice
from megarl.types import CheckFailed
from megarl.weights.quantize import BLOCK, BlockScales, dequantise, quantise, quantise_shards, quantise_tensor
from megarl.weights.transports.inprocess import InProcess

# every finite value of e4m3 by its definition: sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7f is NaN
CODES = [c for c in range(256) if c & 0x7F != 0x7F]


def decoded(code: int) -> float:
    sign, exponent, mantissa = -1 if code & 0x80 else 1, code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if not exponent else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


VALUES = np.array([decoded(code) for code in CODES])


def nearest(x: np.ndarray) -> np.ndarray:
    """The e4m3 value next to x; of two as near, the one whose code is even."""
    distance = np.abs(x[..., None] - VALUES)
    even = np.array([c & 1 for c in CODES]) * 1e-12
    return VALUES[np.argmin(distance + even, axis=-1)]


def by_blocks(weight: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    rows, cols = (-(-n // block) for n in weight.shape)
    values, scales = np.zeros_like(weight, dtype=np.float32), np.ones((rows, cols), np.float32)
    for i in range(rows):
        for j in range(cols):
            at = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
            largest = np.abs(weight[at]).max()
            if largest:
                scales[i, j] = np.float32(largest) / np.float32(448)
            values[at] = nearest((weight[at] / scales[i, j]).astype(np.float64))
    return values, scales


def noise(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    random = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    return (random * torch.logspace(-6, 3, cols)).to(dtype)  # blocks of very different size


@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (17, 31), (40, 9)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_against_block_by_block(shape, dtype):
    weight = noise(*shape, dtype)
    found, scale = quantise(weight, 16)
    values, scales = by_blocks(weight.float().numpy(), 16)
    assert found.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert np.array_equal(scale.numpy(), scales)
    assert np.array_equal(found.float().numpy(), values)


def test_round_trip_is_within_half_a_step():
    weight = noise(300, 260)
    found, scale = quantise(weight)
    assert scale.shape == (3, 3) and BLOCK == 128
    error = (dequantise(found, scale) - weight.float()).abs()
    whole = scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :260]
    # 3 bits of mantissa: half a step is |x| / 16; below 2^-6 steps are 2^-9
    assert bool((error <= torch.maximum(weight.float().abs() / 16, whole * 2**-10) * 1.0001).all())
    assert float(found.float().abs().max()) == 448.0, "a block's largest weight is e4m3's largest"


def test_zero_blocks_and_tiny_blocks():
    weight = torch.zeros(4, 8)
    weight[:, 4:] = 1e-38
    found, scale = quantise(weight, 4)
    assert scale[0, 0] == 1 and not found[:, :4].float().any()
    assert torch.allclose(dequantise(found, scale, 4)[:, 4:], weight[:, 4:], rtol=0.07)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_refused(bad):
    weight = torch.ones(20, 20)
    weight[7, 9] = bad
    for call in (lambda: quantise(weight, 16), lambda: quantise_tensor(weight)):
        with pytest.raises(ValueError, match="NaN or infinite"):
            call()
    box = ShardSlice("w.weight", (0, 0), (20, 20), "p", 0, (20, 1))
    with pytest.raises(CheckFailed, match=r"w\.weight"):
        BlockScales.agree({"w.weight": (20, 20)}, [box], {"p": weight}, InProcess(), 16)


def test_per_tensor():
    weight = noise(30, 20, torch.float32)
    found, scale = quantise_tensor(weight)
    assert scale.shape == (1,) and float(scale) == pytest.approx(float(weight.abs().max()) / 448)
    assert np.array_equal(found.float().numpy(), nearest((weight / scale).double().numpy()))
    assert torch.equal(dequantise(found, scale), found.float() * scale)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 59), st.integers(0, 59), st.sampled_from([8, 16, 24]))
def test_shards_cut_anywhere_give_the_whole_tensors_bytes(rows, cols, cut_row, cut_col, block):
    """Four shards whose borders cut blocks: maxima agreed over shards, then each quantises its own part."""
    weight, cut_row, cut_col = noise(rows, cols, seed=rows), cut_row % rows, cut_col % cols
    whole, scale = quantise(weight, block)
    shards = []
    for top, bottom in ((0, cut_row), (cut_row, rows)):
        for left, right in ((0, cut_col), (cut_col, cols)):
            if bottom > top and right > left:
                part = weight[top:bottom, left:right].contiguous()
                shards.append((ShardSlice("w", (top, left), tuple(part.shape), "p", 0, part.stride()), {"p": part}))

    class Maxima(InProcess):
        """What all ranks would agree on: each shard's table, then the largest."""

        tables: list[torch.Tensor] = []  # noqa: RUF012

        def max(self, values):
            self.tables.append(values)
            return torch.stack(self.tables).amax(0)

    transport = Maxima()
    transport.tables = []
    for box, held in shards:
        agreed = BlockScales.agree({"w": (rows, cols)}, [box], held, transport, block)
    assert torch.equal(agreed.scales["w"], scale)
    for box, held in shards:
        made = quantise_shards([box], held, agreed)["p"]
        (top, left), (height, width) = box.start, box.shape
        expected = whole[top : top + height, left : left + width]
        assert torch.equal(made.view(torch.uint8), expected.contiguous().view(torch.uint8))
