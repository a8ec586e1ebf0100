"""Weights as FP8 (e4m3) for the engine, quantised by the sender: half the bytes of bf16 travel.

    every rank: maxima of the blocks it holds --one max over ranks--> BlockScales, the same on all ranks
    every rank: its own shards --quantise_shards--> e4m3 under the same names --Publisher, 1 byte an element--> engine

Blocks are DeepSeek-V3's: 128 x 128 of the whole tensor, `weight = e4m3 * weight_scale_inv` (fp32, a row of blocks a
row). A tensor's blocks do not know where shards end, so a block that a border cuts needs the maximum of all its parts:
one all-reduce of every block's maximum gives it, cut or not. That is 4 bytes for 16,384 weights, it makes replicas
agree bit for bit, and it hands every engine rank its scales, so they need no transfers of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.models.shards import ShardSlice
from megarl.types import CheckFailed
from megarl.weights.transports import Transport

__all__ = ["BLOCK", "BlockScales", "dequantise", "quantise", "quantise_shards", "quantise_tensor"]

BLOCK = 128
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3


def quantise(weight: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """[R, C] of any float dtype -> e4m3 [R, C] and weight_scale_inv [ceil(R / block), ceil(C / block)] fp32.

    Raises ValueError when a weight is not finite. A block of zeros has scale 1.
    """
    scale = _scale(_block_maxima(weight, (0, 0), block))
    return _quantise_part(weight, (0, 0), scale, block), scale


def quantise_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    """One scale for all of it: e4m3 of `weight`'s shape and fp32 [1]."""
    scale = _scale(weight.float().abs().amax().reshape(1) if weight.numel() else weight.new_zeros(1).float())
    return (weight.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


def dequantise(quantised: Tensor, scale_inv: Tensor, block: int = BLOCK) -> Tensor:
    """fp32. `scale_inv` of one element: per tensor."""
    if scale_inv.numel() == 1:
        return quantised.float() * scale_inv
    rows, cols = (torch.arange(n, device=quantised.device) // block for n in quantised.shape)
    return quantised.float() * scale_inv[rows][:, cols]


def _scale(maxima: Tensor) -> Tensor:
    if not bool(torch.isfinite(maxima).all()):
        raise ValueError("weights that are NaN or infinite cannot be quantised; look at the update before this sync")
    return torch.where(maxima > 0, maxima / LARGEST, 1.0)


def _block_maxima(part: Tensor, start: tuple[int, int], block: int) -> Tensor:
    """[blocks, blocks] fp32: the largest |x| of the part's share of every block of the whole tensor that it touches."""
    lead = [at % block for at in start]
    wide = part.float().abs()
    trail = [-(first + n) % block for first, n in zip(lead, part.shape, strict=True)]
    wide = torch.nn.functional.pad(wide, (lead[1], trail[1], lead[0], trail[0]))
    return wide.view(wide.shape[0] // block, block, wide.shape[1] // block, block).amax((1, 3))


def _quantise_part(part: Tensor, start: tuple[int, int], scale: Tensor, block: int) -> Tensor:
    """`scale`: of the whole tensor."""
    rows, cols = (
        torch.arange(at, at + n, device=part.device) // block for at, n in zip(start, part.shape, strict=True)
    )
    return (part.float() / scale[rows][:, cols]).clamp(-LARGEST, LARGEST).to(E4M3)


@dataclass(frozen=True)
class BlockScales:
    """weight_scale_inv of every quantised HF tensor, whole, on every rank."""

    scales: Mapping[str, Tensor]
    block: int

    @classmethod
    def agree(
        cls,
        shapes: Mapping[str, tuple[int, ...]],  # of the tensors to be quantised, all of two dims
        boxes: Iterable[ShardSlice],  # what this rank holds of them (and of others)
        parameters: Mapping[str, Tensor],
        transport: Transport,
        block: int = BLOCK,
    ) -> BlockScales:
        """Every rank calls it. Raises CheckFailed, on all ranks, naming tensors that are not finite."""
        device = next(iter(parameters.values())).device
        sizes = {name: tuple(math.ceil(n / block) for n in shape) for name, shape in shapes.items()}
        table = torch.zeros(sum(math.prod(size) for size in sizes.values()), device=device)
        views = dict(zip(sizes, table.split([math.prod(size) for size in sizes.values()]), strict=True))
        maxima = {name: views[name].view(size) for name, size in sizes.items()}
        for box in boxes:
            if box.name in maxima:
                first = [at // block for at in box.start]
                found = _block_maxima(_part(box, parameters), (box.start[0], box.start[1]), block)
                here = maxima[box.name][first[0] : first[0] + found.shape[0], first[1] : first[1] + found.shape[1]]
                torch.maximum(here, found, out=here)
        # NaN is larger than everything only after it is made so: what backends make of it in a maximum differs
        table = transport.max(table.nan_to_num_(torch.inf, torch.inf))
        found = dict(zip(sizes, table.split([math.prod(size) for size in sizes.values()]), strict=True))
        wrong = [name for name, maximum in found.items() if not bool(torch.isfinite(maximum).all())]
        if wrong:
            raise CheckFailed(f"{', '.join(wrong[:4])}: weights that are NaN or infinite cannot be quantised to FP8")
        return cls({name: _scale(maximum.view(sizes[name])) for name, maximum in found.items()}, block)


def quantise_shards(
    boxes: Sequence[ShardSlice], parameters: Mapping[str, Tensor], scales: BlockScales
) -> dict[str, Tensor]:
    """This rank's e4m3 of every parameter that holds quantised tensors, laid out as the parameter is."""
    made: dict[str, Tensor] = {}
    for box in boxes:
        if box.name not in scales.scales:
            continue
        parameter = parameters[box.param]
        into = made.get(box.param)
        if into is None:
            into = made[box.param] = torch.zeros(parameter.shape, dtype=E4M3, device=parameter.device)
        start = (box.start[0], box.start[1])
        part = _quantise_part(_part(box, parameters), start, scales.scales[box.name], scales.block)
        into.as_strided(box.shape, box.strides, box.offset).copy_(part)
    return made


def _part(box: ShardSlice, parameters: Mapping[str, Tensor]) -> Tensor:
    tensor = parameters[box.param].detach()
    return tensor.as_strided(box.shape, box.strides, tensor.storage_offset() + box.offset)
