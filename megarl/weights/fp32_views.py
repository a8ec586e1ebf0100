"""Tensors that stay fp32 while 16-bit ones move: they travel as twice as many 16-bit words, bit for bit.

A plan counts in elements of the dtype that moves. In its eyes the last dim of an fp32 tensor is as many times longer
as the dtype is narrower; whoever packs or writes looks at the tensor's memory the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from megarl.models.shards import ShardSlice

__all__ = ["shapes_fp32_as_16bit", "view_fp32_as_16bit"]

FP32_BYTES = 4


def view_fp32_as_16bit(boxes: Iterable[ShardSlice], fp32: frozenset[str], itemsize: int) -> list[ShardSlice]:
    """`itemsize`: bytes of what moves. The boxes of `fp32` tensors must hold their last dim in one stretch."""
    count = FP32_BYTES // itemsize
    return [_in_words(box, count) if box.name in fp32 and count > 1 else box for box in boxes]


def _in_words(box: ShardSlice, count: int) -> ShardSlice:
    assert box.strides[-1] == 1, f"{box} does not hold the last dim in one stretch"
    return replace(
        box,
        start=(*box.start[:-1], box.start[-1] * count),
        shape=(*box.shape[:-1], box.shape[-1] * count),
        offset=box.offset * count,
        strides=(*(stride * count for stride in box.strides[:-1]), 1),
    )


def shapes_fp32_as_16bit(
    shapes: Mapping[str, tuple[int, ...]], fp32: frozenset[str], itemsize: int
) -> dict[str, tuple[int, ...]]:
    count = FP32_BYTES // itemsize
    return {name: (*size[:-1], size[-1] * count) if name in fp32 else size for name, size in shapes.items()}
