"""Views fp32 tensors as twice as many 16-bit elements, bit for bit, where the other weights move as 16-bit elements.

A plan counts elements of the dtype that moves, so the last dim of an fp32 tensor is twice as long. Packing and writing
view memory in the same way (`execute.strided_view`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from megarl.models.shards import ShardSlice

FP32_BYTES = 4


def view_fp32_as_16bit(slices: Iterable[ShardSlice], fp32: frozenset[str], itemsize: int) -> list[ShardSlice]:
    """Returns all slices, those of `fp32` tensors widened; these must be contiguous in their last dim.

    `itemsize`: bytes of an element that moves.
    """
    count = FP32_BYTES // itemsize
    return [_widen(part, count) if part.name in fp32 and count > 1 else part for part in slices]


def _widen(part: ShardSlice, count: int) -> ShardSlice:
    assert part.strides[-1] == 1, f"{part} is not contiguous in its last dim"
    return replace(
        part,
        start=(*part.start[:-1], part.start[-1] * count),
        shape=(*part.shape[:-1], part.shape[-1] * count),
        offset=part.offset * count,
        strides=(*(stride * count for stride in part.strides[:-1]), 1),
    )


def shapes_fp32_as_16bit(
    shapes: Mapping[str, tuple[int, ...]], fp32: frozenset[str], itemsize: int
) -> dict[str, tuple[int, ...]]:
    count = FP32_BYTES // itemsize
    return {name: (*size[:-1], size[-1] * count) if name in fp32 else size for name, size in shapes.items()}
