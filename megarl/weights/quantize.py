"""Quantises and dequantises weights in the block formats of models/formats.py. Plain torch, on any device.

    w [..., out, in] --block_amax--> scales --round--> {suffix: tensor} --from_blocks--> w, rounded to the format

Scales and products are fp32. A block with NaN or inf becomes NaN as a whole, except for a NaN in FP8; nothing else is
hidden: values beyond the largest element (after a scale was rounded down) are clamped to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.models.formats import BlockFormat

E4M3_MAX = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the magnitude of codes 0 to 7; 8 to 15 are negative
Block = tuple[int, int]


def block_amax(x: Tensor, block: Block) -> Tensor:
    """Returns the largest magnitude in each block of [..., rows, columns], fp32 [..., block rows, block columns].

    block: rows and columns of a block; 0: all of them. The last blocks may be partial.
    """
    rows, columns = (size or whole for size, whole in zip(block, x.shape[-2:], strict=True))
    padded = pad(x.abs(), (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
    return padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).amax(dim=(-3, -1)).float()


def fp8_scales(amax: Tensor, *, power_of_2: bool = False) -> Tensor:
    """Returns amax / 448, or the least power of two that is not below; 1 where that is zero."""
    scales = amax / E4M3_MAX
    scales = scales.where(scales != 0, 1)
    if not power_of_2:
        return scales
    mantissa, _ = torch.frexp(scales)  # in [0.5, 1)
    return scales / mantissa * torch.where(mantissa > 0.5, 1.0, 0.5)


def to_fp8(x: Tensor, scales: Tensor, block: Block, start: Block = (0, 0)) -> Tensor:
    """Returns x / scale rounded to e4m3; see `from_fp8`."""
    quotient = x.float() / _spread(scales.float(), block, start, x.shape[-2:])
    return quotient.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def from_fp8(values: Tensor, scales: Tensor, block: Block, dtype: torch.dtype, start: Block = (0, 0)) -> Tensor:
    """Returns value x scale, rounded once to `dtype`.

    start: row and column of the first value in the first block of `scales`, if the values are a slice that begins
    within a block
    """
    return values.float().mul_(_spread(scales.float(), block, start, values.shape[-2:])).to(dtype)


def _spread(scales: Tensor, block: Block, start: Block, shape: Sequence[int]) -> Tensor:
    """Repeats each scale over its block; a dim in which all share one keeps size 1."""
    for dim, size, first, count in zip((-2, -1), block, start, shape, strict=True):
        if size > 1:
            scales = scales.repeat_interleave(size, dim).narrow(dim, first, count)
    return scales


def quantize(w: Tensor, fmt: BlockFormat) -> dict[str, Tensor]:
    """Returns the stored tensors of `w`, [..., out, in] or as the format's `is_transposed` requires, by suffix.

    Raises ValueError if the shape does not fit. Rounding is to nearest, ties to even. Scales:
    e4m3: largest magnitude / 448                   int4: / 7, so values that were rounded before are unchanged
    e2m1: / 6, or a power of two: that of the largest magnitude, rounded to 1.5 bits, / 4 (as compressed-tensors)
    """
    if refusal := fmt.refusal(tuple(w.shape)):
        raise ValueError(f"{refusal}, so it cannot be stored as {fmt.name}")
    full_shape = torch.tensor(w.shape)
    if fmt.is_transposed:
        w = w.transpose(-1, -2)
    amax, extra = block_amax(w, fmt.block), {}
    if fmt.element == "e4m3":
        scales = stored = fp8_scales(amax, power_of_2=fmt.power_of_2).to(_DTYPES[fmt.scale_dtype])
        if fmt.block == (0, 0):
            stored = scales.view(1)
        values = to_fp8(w, scales, fmt.block)
    else:
        divisor = torch.ones(1, device=w.device)
        if fmt.global_scale:
            largest = amax.amax()
            extra[fmt.global_scale] = divisor = (E4M3_MAX * 6 / largest.where(largest > 0, 1)).view(1)
        stored = _small_scales(amax, divisor, fmt)
        quotient = w.float() / _spread(_decode(stored) / divisor, fmt.block, (0, 0), w.shape[-2:])
        values = _pack(_codes(quotient, fmt), fmt)
    if fmt.full_shape:
        extra[fmt.full_shape] = full_shape
    shape = fmt.parts(tuple(full_shape.tolist()))[fmt.values][1]
    return {fmt.values: values.reshape(shape), fmt.scale: stored} | extra


def dequantize(
    parts: Mapping[str, Tensor], fmt: BlockFormat, shape: Sequence[int], dtype: torch.dtype, start: Block = (0, 0)
) -> Tensor:
    """Returns [..., rows, columns] of `shape` as stored (transposed if the format says so), rounded once to `dtype`.

    parts: by suffix; `fmt.full_shape` is not needed. Of a slice: its items, and all scales of blocks that it touches
    start: where the slice begins in the first of these blocks; its columns begin at a multiple of `column_step`
    """
    scales = _decode(parts[fmt.scale])
    if fmt.global_scale:
        scales = scales / parts[fmt.global_scale]
    if fmt.element == "e4m3":
        return from_fp8(parts[fmt.values].view(*shape), scales, fmt.block, dtype, start)
    items = parts[fmt.values].reshape(*shape[:-1], -1)
    pairs = _pairs(fmt).to(items.device)[items.view(torch.uint8).int()]  # [..., bytes, 2]
    values = pairs.flatten(-2)[..., : shape[-1]]
    return values.mul_(_spread(scales, fmt.block, start, shape[-2:])).to(dtype)


_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}


def _decode(scales: Tensor) -> Tensor:
    """Stored scales as fp32; bytes are exponents, of which 255 is NaN."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()


def _small_scales(amax: Tensor, divisor: Tensor, fmt: BlockFormat) -> Tensor:
    """The stored scales of 4-bit elements. Those of a zero block are any, of one that is not finite NaN."""
    if fmt.scale_dtype == "U8":
        exponents = (amax.view(torch.int32) + (1 << 21)) >> 23  # a mantissa of 1.75 or more counts as 2
        return torch.where(amax.isfinite(), (exponents - 2).clamp(0, 254), 255).to(torch.uint8)
    scales = torch.where(amax.isfinite(), amax * divisor / (7 if fmt.element == "int4" else 6), torch.nan)
    scales = scales.to(_DTYPES[fmt.scale_dtype])
    smallest = torch.finfo(scales.dtype).eps
    return scales.where(scales != 0, smallest)


def _codes(quotient: Tensor, fmt: BlockFormat) -> Tensor:
    """uint8 in 0..15 of the nearest elements."""
    if fmt.element == "int4":
        return (quotient.nan_to_num_().round_().clamp_(-8, 7) + 8).to(torch.uint8)
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=quotient.device)
    below = torch.nextafter(middles, torch.zeros_like(middles))  # a tie goes to the even code, up at every second
    up = torch.tensor([False, True, False, True, False, True, False], device=quotient.device)
    codes = torch.bucketize(quotient.abs().contiguous(), middles.where(~up, below))
    return (codes + 8 * (quotient < 0)).to(torch.uint8)


def _pack(codes: Tensor, fmt: BlockFormat) -> Tensor:
    """Items of [..., columns] codes: two in a byte, the first in the low bits; missing ones are zero bits."""
    codes = pad(codes, (0, -codes.shape[-1] % fmt.per_item)).unflatten(-1, (-1, 2))
    packed = codes[..., 0] | codes[..., 1] << 4
    return packed.view(torch.int32) if fmt.item == "I32" else packed


@cache
def _pairs(fmt: BlockFormat) -> Tensor:
    """[256, 2]: the two elements in each byte."""
    values = torch.arange(16.0) - 8 if fmt.element == "int4" else torch.tensor([*E2M1, *(-x for x in E2M1)])
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)
