"""Quantises and dequantises weights in the block formats of models/formats.py. Plain torch, on any
device.

    w [..., out, in] --block_amax--> scales --round--> {suffix: tensor} --dequantize--> w, rounded

Scales and products are fp32. A block with NaN or inf becomes NaN as a whole, except for a NaN in
FP8. Nothing else is hidden: values beyond the largest element (after a scale was rounded down) are
clamped to it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.models.formats import FORMATS, BlockFormat, coarse
from megarl.models.shape import Shape

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
E4M3_MAX = 448.0
# magnitudes of codes 0 to 7; codes 8 to 15 are their negatives
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Block = tuple[int, int]


def block_amax(x: Tensor, block: Block) -> Tensor:
    """Returns the largest magnitude in each block of [..., rows, columns], fp32 [..., block rows,
    block columns]. A 0 in `block` means all rows or columns. The last block may be partial."""
    rows = block[0] or x.shape[-2]
    columns = block[1] or x.shape[-1]
    padded = pad(x.abs(), (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
    blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    return blocks.amax(dim=(-3, -1)).float()


def fp8_scales(amax: Tensor, *, power_of_2: bool = False) -> Tensor:
    """Returns amax / 448, with `power_of_2` rounded up to a power of two; 1 where it is zero."""
    scales = amax / E4M3_MAX
    scales = scales.where(scales != 0, 1)
    if not power_of_2:
        return scales
    mantissa, _ = torch.frexp(scales)  # in [0.5, 1)
    upwards = torch.where(mantissa > 0.5, 1.0, 0.5)
    return scales / mantissa * upwards


def to_fp8(
    x: Tensor,
    scales: Tensor,
    block: Block,
    start: Block = (0, 0),
) -> Tensor:
    """Returns x / scale rounded to e4m3; see `from_fp8`."""
    quotient = x.float() / _spread(scales.float(), block, start, x.shape[-2:])
    return quotient.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def from_fp8(
    values: Tensor,
    scales: Tensor,
    block: Block,
    dtype: torch.dtype,
    start: Block = (0, 0),
) -> Tensor:
    """Returns value x scale, rounded once to `dtype`. `start`: row and column of the first value
    within its block, whose scale is the first of `scales`."""
    factors = _spread(scales.float(), block, start, values.shape[-2:])
    return values.float().mul_(factors).to(dtype)


def _spread(
    scales: Tensor,
    block: Block,
    start: Block,
    shape: Sequence[int],
) -> Tensor:
    """Repeats each scale over its block; a dim with one scale for all elements keeps size 1."""
    for dim, size, first, count in zip((-2, -1), block, start, shape, strict=True):
        if size > 1:
            scales = scales.repeat_interleave(size, dim).narrow(dim, first, count)
    return scales


def quantize(w: Tensor, fmt: BlockFormat) -> dict[str, Tensor]:
    """Returns {suffix: stored tensor} for `w`, [..., out, in], or [..., in, out] if the format
    `is_transposed`.

    Raises ValueError if the inputs are not a multiple of the format's `column_step`. Rounds to
    nearest, ties to even. Scales, from a block's largest magnitude:

    e4m3: magnitude / 448
    int4: magnitude / 7, so that values that were rounded before are unchanged
    e2m1: magnitude / 6; or, as in compressed-tensors, a power of two: that of the magnitude / 4,
        where a mantissa of 1.75 or more counts as 2
    """
    shape = tuple(w.shape)
    if fmt.is_transposed:
        w = w.transpose(-1, -2)
    inputs = w.shape[-1]
    if inputs % fmt.column_step:
        raise ValueError(
            f"{shape} has {inputs} inputs, not a multiple of {fmt.column_step} as {fmt.name} "
            "requires"
        )
    amax = block_amax(w, fmt.block)
    extra = {}
    divisor = torch.ones(1, device=w.device)
    if fmt.global_scale:
        largest = amax.amax()
        divisor = (E4M3_MAX * 6 / largest.where(largest > 0, 1)).view(1)
        extra[fmt.global_scale] = divisor
    if fmt.full_shape:
        extra[fmt.full_shape] = torch.tensor(shape)
    scales = block_scales(amax, fmt, divisor)
    values = encode_blocks(w, _decode(scales) / divisor, fmt).view(DTYPES[fmt.item])
    parts = {fmt.values: values, fmt.scale: scales}
    stored = fmt.parts(shape)
    return {suffix: part.reshape(stored[suffix][1]) for suffix, part in parts.items()} | extra


def block_scales(amax: Tensor, fmt: BlockFormat, divisor: Tensor | float = 1.0) -> Tensor:
    """Returns the stored scales of blocks with the largest magnitudes `amax`. The scale of a zero
    block is arbitrary.

    divisor: the tensor's global scale
    """
    dtype = DTYPES[fmt.scale_dtype]
    if fmt.element == "e4m3":
        return fp8_scales(amax, power_of_2=fmt.power_of_2).to(dtype)
    if fmt.scale_dtype == "U8":
        # a mantissa of 1.75 or more counts as 2
        exponents = (amax.view(torch.int32) + (1 << 21)) >> 23
        scales = (exponents - 2).clamp(0, 254)
        return scales.where(amax.isfinite(), 255).to(dtype)
    scales = amax * divisor / (7 if fmt.element == "int4" else 6)
    scales = scales.where(amax.isfinite(), torch.nan).to(dtype)
    return scales.where(scales != 0, torch.finfo(dtype).eps)


def encode_blocks(x: Tensor, scales: Tensor, fmt: BlockFormat, start: Block = (0, 0)) -> Tensor:
    """Returns x / scale as elements of `fmt`: float8_e4m3fn, or uint8 with two elements each.

    scales: as stored, or fp32; the first one is that of the block of x's first element
    start: row and column of x's first element within its block
    """
    scales = _decode(scales)
    if fmt.element == "e4m3":
        return to_fp8(x, scales, fmt.block, start)
    codes = _codes(x.float() / _spread(scales, fmt.block, start, x.shape[-2:]), fmt)
    first, second = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return first | second << 4


def dequantize(
    parts: Mapping[str, Tensor],
    fmt: BlockFormat,
    shape: Sequence[int],
    dtype: torch.dtype,
    start: Block = (0, 0),
) -> Tensor:
    """Returns [..., rows, columns] of `shape` as stored (transposed if the format is), rounded
    once to `dtype`.

    parts: {suffix: stored tensor}; `fmt.full_shape` is not needed. For a slice: its items, and the
        scales of all blocks that it touches
    start: row and column of the slice within the first of these blocks; the columns of a slice
        begin at a multiple of `column_step`
    """
    scales = _decode(parts[fmt.scale])
    if fmt.global_scale:
        scales = scales / parts[fmt.global_scale]
    values = parts[fmt.values].reshape(*shape[:-1], -1)
    if fmt.element == "e4m3":
        return from_fp8(values, scales, fmt.block, dtype, start)
    pairs = _pairs(fmt).to(values.device)[values.view(torch.uint8).int()]  # [..., bytes, 2]
    values = pairs.flatten(-2)[..., : shape[-1]]
    return values.mul_(_spread(scales, fmt.block, start, shape[-2:])).to(dtype)


def _decode(scales: Tensor) -> Tensor:
    """Returns stored scales as fp32. uint8 scales are exponents; 255 is NaN."""
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.float()


def _codes(quotient: Tensor, fmt: BlockFormat) -> Tensor:
    """Returns the codes, uint8 in 0..15, of the nearest elements."""
    if fmt.element == "int4":
        return (quotient.nan_to_num_().round_().clamp_(-8, 7) + 8).to(torch.uint8)
    # midpoints between elements; a tie goes to the even code, so every second midpoint rounds up
    # and is an ulp lower here
    middles = torch.tensor(
        [0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0], device=quotient.device
    )
    codes = torch.bucketize(quotient.abs().contiguous(), middles)
    return (codes + 8 * quotient.signbit()).to(torch.uint8)


@dataclass(frozen=True)
class Storage:
    """How a folder stores its tensors: those in `names` in `format`, all others unquantised."""

    format: BlockFormat = FORMATS["fp8_block"]
    names: frozenset[str] = frozenset()

    @property
    def block_format(self) -> BlockFormat | None:
        return self.format if self.names else None

    def parts(
        self,
        name: str,
        shape: Shape,
        dtype: torch.dtype,
    ) -> dict[str, tuple[str, Shape]]:
        """Returns {stored name: (dtype, shape)} for the tensor `name`, with dtypes as safetensors
        names them."""
        if name not in self.names:
            return {name: (NAMES[dtype], shape)}
        return {name + suffix: part for suffix, part in self.format.parts(shape).items()}

    def encode(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Returns {stored name: stored tensor} for a tensor, or for one of its matrices."""
        if name not in self.names:
            return {name: tensor}
        if tensor.dim() == 2 or self.format.global_scale:
            parts = quantize(tensor, self.format)
            return {name + suffix: part for suffix, part in parts.items()}
        matrices = [quantize(matrix, self.format) for matrix in tensor]  # temporaries of one matrix
        stacked = {}
        for suffix in matrices[0]:
            stacked[name + suffix] = torch.stack([parts[suffix] for parts in matrices])
        return stacked

    def decode(
        self,
        name: str,
        ranges: tuple[list[range], range, range],  # `matrix_ranges` of a slice
        read: Callable[..., Tensor],
        like: Tensor,
    ) -> Tensor:
        """Returns [rows, columns] of a slice of a tensor, as stored, in the dtype of `like`.

        read: called with a stored tensor's name and a range per dim; returns that rectangle
        """
        fmt = self.format
        lead, rows, columns = ranges
        step = fmt.column_step
        high, wide = fmt.block
        whole = range(columns.start // step * step, -(-columns.stop // step) * step)
        wide_blocks = coarse(whole, wide)
        last = [coarse(whole, fmt.per_item)]
        if fmt.is_transposed:
            last = [wide_blocks, range(wide // fmt.per_item)]
        scales = read(name + fmt.scale, *lead, coarse(rows, high), wide_blocks)
        parts = {
            fmt.scale: scales.view(-1, len(wide_blocks)),
            fmt.values: read(name + fmt.values, *lead, rows, *last),
        }
        if fmt.global_scale:
            parts[fmt.global_scale] = read(name + fmt.global_scale)
        parts = {suffix: stored.to(like.device) for suffix, stored in parts.items()}
        start = (rows.start % high if high else 0, whole.start % wide if wide else 0)
        values = dequantize(parts, fmt, (len(rows), len(whole)), like.dtype, start)
        return values.narrow(1, columns.start - whole.start, len(columns))

    def round(self, matrix: Tensor) -> Tensor:
        """Returns a matrix of a quantised tensor as it will be read back."""
        parts = quantize(matrix, self.format)
        if self.format.is_transposed:
            return dequantize(parts, self.format, matrix.T.shape, matrix.dtype).T
        return dequantize(parts, self.format, matrix.shape, matrix.dtype)


PLAIN = Storage()


@cache
def _pairs(fmt: BlockFormat) -> Tensor:
    """Returns [256, 2]: the two elements in each byte."""
    if fmt.element == "int4":
        values = torch.arange(16.0) - 8
    else:
        magnitudes = torch.tensor(E2M1)
        values = torch.cat([magnitudes, -magnitudes])
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)
