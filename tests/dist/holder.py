"""A trainer that only holds weights: random HF tensors, and parameters under Megatron's names filled from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megarl.models.shape import Shape
from megarl.models.shards import ShardSlice


def random_weights(
    shapes: Mapping[str, Shape], fp32: frozenset[str], dtype: torch.dtype, seed: int
) -> dict[str, Tensor]:
    """HF tensors with norms off one, so that every tensor matters."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in shapes.items():
        noise = torch.randn(size, generator=generator)
        noise = 1 + 0.3 * noise if len(size) == 1 and "norm" in name else 0.12 * noise
        weights[name] = noise if name in fp32 else noise.to(dtype)
    return weights


def holder(slices: Sequence[ShardSlice], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A rank's parameters under Megatron's names; what no part covers is NaN, so that sending it would show."""
    sizes: dict[str, int] = {}
    for part in slices:
        last = sum((n - 1) * stride for n, stride in zip(part.shape, part.strides, strict=True))
        sizes[part.param] = max(sizes.get(part.param, 0), part.offset + last + 1)
    dtypes = {part.param: weights[part.name].dtype for part in slices}
    found = {
        name: torch.full((size + 3,), torch.nan, dtype=dtypes[name])[:size]
        for name, size in sizes.items()
    }
    for part in slices:
        whole = weights[part.name]
        if len(part.shape) > whole.dim():
            whole = whole.unflatten(-1, (-1, 2))
        values = whole[tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))]
        found[part.param].as_strided(part.shape, part.strides, part.offset).copy_(values)
    return found
