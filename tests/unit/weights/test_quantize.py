"""Each block format against compressed-tensors' and transformers' own code, bit for bit, and at the range's edges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

from megarl.models.formats import ENGINE_FORMATS, FORMATS
from megarl.weights.encode.quantize import (
    E2M1,
    block_amax,
    dequantize,
    fp8_scales,
    from_fp8,
    quantize,
    to_fp8,
)

BF16, FP32 = torch.bfloat16, torch.float32
ARGS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8_block": ("naive-quantized", {"num_bits": 8, "type": "float", "strategy": "block",
                                      "block_structure": [128, 128]}),
    "fp8_channel": ("naive-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8_tensor": ("naive-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                                       "scale_dtype": torch.float8_e4m3fn}),
    "mxfp4_pack": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
                                            "scale_dtype": torch.uint8}),
    "int4_group": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):  # compressed-tensors compiles its rounding
        yield


def weights(rows: int = 192, columns: int = 320) -> Tensor:
    """Random values of very different sizes; blocks of zeros, of one value, of subnormals, and with a single value."""
    generator = torch.Generator().manual_seed(rows)
    w = torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(
        -9, 9, (rows, 1), generator=generator
    )
    w[:, 64:96] = 0
    w[3, 96:128] = -0.3
    w[4, 128:160] = 2.0**-130
    w[5, 160:192] = 0
    w[5, 170] = 7.0
    return w.to(BF16).float()


def compressor(name: str) -> tuple[Any, QuantizationScheme]:
    kind, args = ARGS[name]
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**args), format=CompressionFormat(kind)
    )
    return BaseCompressor.get_value_from_registry(kind), scheme


@pytest.mark.parametrize("name", ARGS)
def test_equal_to_compressed_tensors(name: str) -> None:
    fmt, w, (theirs, scheme) = (
        FORMATS[name],
        weights(256 if name == "fp8_block" else 192, 384),
        compressor(name),
    )
    parts = quantize(w, fmt)
    amax = block_amax(w, fmt.block)
    state: dict[str, Tensor] = {"weight": w}
    if fmt.global_scale:
        state["weight_global_scale"] = generate_gparam(w.min(), w.max()).view(1)
        assert torch.equal(state["weight_global_scale"], parts["_global_scale"])
    scales, _ = calculate_qparams(
        -amax, amax, QuantizationArgs(**ARGS[name][1]), state.get("weight_global_scale")
    )
    if name == "int4_group":  # theirs is / 7.5, which would shrink the largest value each time
        scales = parts["_scale"].float()
    state["weight_scale"] = scales.view(1) if fmt.block == (0, 0) else scales
    packed = theirs.compress(state, scheme)
    is_used = amax > 0  # the scale of a block of zeros is arbitrary
    if fmt.block != (0, 0):
        mine, other = parts[fmt.scale].float()[is_used], packed["weight_scale"].float()[is_used]
        assert torch.equal(mine, other.to(parts[fmt.scale].dtype).float()), "scales"
    values = packed["weight" + fmt.values]
    assert torch.equal(values.view(torch.uint8), parts[fmt.values].view(torch.uint8)), "values"
    back = dequantize(parts, fmt, w.shape, BF16)
    stored = {"weight" + suffix: part for suffix, part in parts.items()}
    if fmt.element == "e4m3":
        stored["weight_scale"] = parts[fmt.scale]
    opened = theirs.decompress(stored, scheme)["weight"]
    assert torch.equal(opened.to(BF16), back)


def test_fp8_blocks_equal_to_transformers() -> None:
    """Whole blocks; transformers passes others through. Its scale is 1 / (448 / amax), at most an ulp away."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    fmt, w = FORMATS["fp8_block"], weights(256, 384)
    config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt=None)
    theirs: Any = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"x.weight": w})  # type: ignore[arg-type]
    parts = quantize(w, fmt)
    torch.testing.assert_close(
        parts["_scale_inv"], theirs["x.weight_scale_inv"], rtol=2**-22, atol=0
    )
    stored = {"": theirs["x.weight"], "_scale_inv": theirs["x.weight_scale_inv"]}
    for dtype in (BF16, FP32):
        opened = Fp8Dequantize(None)._dequantize_one(*stored.values(), output_dtype=dtype)
        assert torch.equal(opened, dequantize(stored, fmt, w.shape, dtype))
    torch.testing.assert_close(
        dequantize(parts, fmt, w.shape, BF16), dequantize(stored, fmt, w.shape, BF16)
    )


@pytest.mark.parametrize("shape", [(576, 160), (1, 1), (129, 128), (5, 3, 200)])
def test_partial_fp8_blocks(shape: tuple[int, ...]) -> None:
    """The scale of row r is that of block r // 128: each block on its own, by plain loops in fp64."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    fmt = FORMATS["fp8_block"]
    parts = quantize(w, fmt)
    assert {suffix: (tuple(part.shape)) for suffix, part in parts.items()} == {
        suffix: size for suffix, (_, size) in fmt.parts(shape).items()
    }
    back = dequantize(parts, fmt, shape, FP32)
    matrices = (part.reshape(-1, *part.shape[-2:]) for part in (w, *parts.values(), back))
    for matrix, values, scales, opened in zip(*matrices, strict=True):
        for row in range(0, shape[-2], 128):
            for column in range(0, shape[-1], 128):
                block = (slice(row, row + 128), slice(column, column + 128))
                scale = scales[row // 128, column // 128]
                assert scale == matrix[block].abs().max() / 448
                exact = values[block].double() * scale.double()
                assert torch.equal(opened[block], exact.float())
                # half of the largest spacing, 32
                assert (exact - matrix[block]).abs().max() <= 448 * scale / 28


@pytest.mark.parametrize("name", FORMATS)
def test_slice_equals_slice_of_whole(name: str) -> None:
    """Rows and columns that begin within a block need only the items and the scales that they touch."""
    fmt = FORMATS[name]
    w = weights(200, 320)
    parts = quantize(w.T.contiguous() if fmt.is_transposed else w, fmt)
    whole = dequantize(parts, fmt, w.shape, FP32)
    high, wide = fmt.block
    step = fmt.column_step
    for first, last, left, right in (
        (0, 200, 0, 320),
        (100, 130, 160, 288),
        (199, 200, 0, 32),
        (127, 129, 128, 320),
    ):
        items = parts[fmt.values].reshape(200, -1)[
            first:last, left // fmt.per_item : right // fmt.per_item
        ]
        scales = parts[fmt.scale].view(fmt.grid(200, 320))
        scales = scales[first // high : -(-last // high)] if high else scales
        scales = scales[:, left // wide : -(-right // wide)] if wide else scales
        start = (first % high if high else 0, left % wide if wide else 0)
        assert left % step == 0 or fmt.element == "e4m3"
        part = {**parts, fmt.values: items.contiguous(), fmt.scale: scales}
        opened = dequantize(part, fmt, (last - first, right - left), FP32, start)
        assert torch.equal(opened, whole[first:last, left:right])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_second_rounding_changes_nothing(name: str, dtype: torch.dtype) -> None:
    """Weights that come from a format return to the same elements; a bf16 copy moves scales by up to an ulp of bf16."""
    fmt = FORMATS[name]
    w = weights(192, 384)
    w /= block_amax(w, (1, 0))  # NVFP4's scales have a narrow range, and few bits below it
    w = w.T.contiguous() if fmt.is_transposed else w
    first = quantize(w, fmt)
    shape = w.T.shape if fmt.is_transposed else w.shape
    copy = dequantize(first, fmt, shape, dtype)
    second = quantize(copy.T.contiguous() if fmt.is_transposed else copy, fmt)
    if dtype == FP32:
        assert torch.equal(copy, dequantize(second, fmt, shape, dtype))
    torch.testing.assert_close(
        copy.float(), dequantize(second, fmt, shape, FP32), rtol=2**-6, atol=0
    )


@pytest.mark.parametrize("name", FORMATS)
def test_edges(name: str) -> None:
    """Zeros stay zero, subnormals never become NaN, a block with inf is not finite, and the next block is unharmed."""
    fmt = FORMATS[name]
    w = torch.ones(256, 256)
    w[:128, :128] = 0
    w[128:, :128] = 1e-42
    parts = quantize(w, fmt)
    back = dequantize(parts, fmt, w.shape, FP32)
    assert back.isfinite().all() and (back >= 0).all()
    # the sign of a zero, too, except in integers
    minus = dequantize(quantize(-w, fmt), fmt, w.shape, FP32)
    assert fmt.element == "int4" or torch.equal(minus.view(torch.int32), (-back).view(torch.int32))
    assert back[:128, :128].count_nonzero() == 0 or fmt.is_transposed
    w[200, 200] = torch.inf
    back = dequantize(quantize(w, fmt), fmt, w.shape, FP32)
    assert not back.T[200, 200].isfinite() and not back[200, 200].isfinite()
    if fmt.block not in ((0, 0),) and not fmt.global_scale:
        assert torch.equal(back[:200, :128], dequantize(parts, fmt, w.shape, FP32)[:200, :128])


def test_every_code_survives() -> None:
    """All elements times all scales: unpacking gives the product, packing the same bytes."""
    for name in ("mxfp4_pack", "nvfp4", "int4_group"):
        fmt = FORMATS[name]
        codes = torch.arange(16, dtype=torch.uint8).repeat(2 if fmt.block[1] == 32 else 1)
        codes = codes.repeat(4, 1)
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
        scales = torch.tensor([[1.0], [0.5], [4.0], [0.25]])
        parts = quantize(scales * (torch.arange(32.0).repeat(4, 1)[:, : codes.shape[1]]), fmt)
        parts[fmt.values] = packed.view(torch.int32) if fmt.item == "I32" else packed
        if fmt.scale_dtype == "U8":
            parts[fmt.scale] = (scales.log2() + 127).to(torch.uint8)
        else:
            parts[fmt.scale] = scales.to(parts[fmt.scale].dtype)
        if fmt.global_scale:
            parts[fmt.global_scale] = torch.ones(1)
        elements = (
            torch.arange(16.0) - 8
            if fmt.element == "int4"
            else torch.tensor([*E2M1, *(-x for x in E2M1)])
        )
        opened = dequantize(parts, fmt, codes.shape, FP32)
        assert torch.equal(opened, elements[codes.int()] * scales)


def test_mxfp4_equal_to_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 64, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 253, (2, 64, 3), dtype=torch.uint8, generator=generator)
    theirs = convert_moe_packed_tensors(blocks, scales)  # [2, 96, 64]
    mine = dequantize({"_blocks": blocks, "_scales": scales}, FORMATS["mxfp4"], (2, 64, 96), BF16)
    assert torch.equal(mine.transpose(1, 2), theirs)


def test_blocks_across_ranks_and_powers_of_two() -> None:
    w = torch.randn(256, 256, generator=torch.Generator().manual_seed(2))
    block = (128, 128)
    scales = fp8_scales(block_amax(w, block))
    whole = to_fp8(w, scales, block)
    piece = to_fp8(w[100:150], scales[:2], block, (100, 0))
    assert torch.equal(piece.float(), whole[100:150].float())
    assert torch.equal(
        from_fp8(piece, scales[:2], block, FP32, (100, 0)),
        from_fp8(whole, scales, block, FP32)[100:150],
    )
    powers = fp8_scales(block_amax(w, block), power_of_2=True)
    assert torch.equal(powers.log2(), scales.log2().ceil())
    assert torch.equal(
        quantize(w, replace(FORMATS["fp8_block"], power_of_2=True))["_scale_inv"], powers
    )
    exact = torch.tensor([448.0, 449.0, 0.0, 448 * 2.0**-140])
    assert fp8_scales(exact, power_of_2=True).tolist() == [1.0, 2.0, 1.0, 2.0**-140]


def test_the_engines_scales_are_powers_of_two() -> None:
    """With others, vLLM on a GPU quantises a second time: weights were off by 0.042, not by 0.027, on an H200."""
    w = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    for fmt in ENGINE_FORMATS["fp8"]:
        mantissa, _ = quantize(w, fmt)[fmt.scale].frexp()
        assert mantissa.unique().tolist() == [0.5]


def test_refused_shapes() -> None:
    for name in ("mxfp4", "mxfp4_pack", "nvfp4", "int4_group"):
        shape = (24, 40) if FORMATS[name].is_transposed else (40, 24)
        with pytest.raises(ValueError, match=f"24 inputs, not a multiple of .* as {name} requires"):
            quantize(torch.ones(shape), FORMATS[name])
