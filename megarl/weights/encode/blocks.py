"""Encodes a trainer's weights in an engine's block format: all ranks agree on the scales, and
slices are encoded while they are packed.

    parameters --largest magnitude per block--> max over the ranks that share a tensor --> scales,
        the same on each
    slice of a parameter, scales --encode--> bytes of the engine's weight, without a copy of the
        parameter

A block may be split between tensor-parallel ranks, so the maximum is first taken over these: one
all-reduce of a number per block. `applied` gives the trainer the values that the engine has."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.models.formats import BlockFormat
from megarl.models.shards import ShardSlice, Slices, recounted
from megarl.weights.encode.quantize import block_amax, block_scales, dequantize, encode_blocks
from megarl.weights.sync.execute import Parameters, strided_view
from megarl.weights.sync.publish import WeightSender

# (values, is_expert): all-reduces in place to the max over the ranks that share these weights
Reduce = Callable[[Tensor, bool], None]


class BlockEncoder:
    """Implements execute.Encoder. `slices`: this rank's slices of weights and scales. `reduce_max`:
    a collective of the trainer."""

    def __init__(
        self,
        slices: Slices,
        fmt: BlockFormat,
        reduce_max: Reduce,
    ) -> None:
        assert not fmt.global_scale, f"{fmt.name} has a scale of whole tensors"
        self._slices = slices
        self._fmt = fmt
        self._reduce_max = reduce_max
        self._grids = {
            part.name.removesuffix(fmt.scale): part
            for part in slices
            if part.name.endswith(fmt.scale)
        }
        self._weights = [part for part in slices if part.name in self._grids]
        self._scales = {}  # weight's HF name -> scales
        self.names = frozenset(self._grids)

    def sender(self, parameters: Callable[[], Parameters]) -> WeightSender:
        return WeightSender(self._slices, lambda: self.measure(parameters()), self)

    @torch.no_grad()
    def measure(self, parameters: Parameters) -> dict[str, Tensor]:
        """A collective. Computes the scales of the current weights. Returns the parameters, and the
        scales by the `param` of their slices."""
        device = next(iter(parameters.values())).device
        for is_expert in (False, True):
            grids = {
                name: part
                for name, part in self._grids.items()
                if (".experts." in part.param) == is_expert
            }
            sizes = [part.numel for part in grids.values()]
            flat = torch.zeros(sum(sizes), device=device)
            parts = zip(grids, flat.split(sizes), strict=True)
            amax = {name: part.view(grids[name].shape) for name, part in parts}
            for part in self._weights:
                if part.name in amax:
                    values = strided_view(parameters[part.param], part)
                    top, left = self._first(part.start)
                    found = block_amax(
                        pad(values, (left, 0, top, 0)) if top or left else values, self._fmt.block
                    )
                    region = self._region(amax[part.name], part)
                    region.copy_(torch.maximum(found, region))
            self._reduce_max(flat, is_expert)
            for name, values in amax.items():
                self._scales[name] = block_scales(values, self._fmt)
        scales = {part.param: self._scales[name] for name, part in self._grids.items()}
        return {**parameters, **scales}

    def encode(self, part: ShardSlice, parameter: Tensor) -> Tensor:
        part = recounted(part, 8, self._fmt.bits)
        parts = self._parts(part, strided_view(parameter, part))
        return parts[self._fmt.values].view(torch.uint8)

    def _parts(self, part: ShardSlice, values: Tensor) -> dict[str, Tensor]:
        """Returns {suffix: stored tensor} for the values of a slice."""
        scales = self._region(self._scales[part.name], part)
        encoded = encode_blocks(values, scales, self._fmt, self._first(part.start))
        return {self._fmt.values: encoded, self._fmt.scale: scales}

    @contextmanager
    def applied(self, parameters: Parameters) -> Iterator[None]:
        """A collective. Within the context, the weights have the values that the engine has."""
        self.measure(parameters)
        weights = {part.param: parameters[part.param].detach() for part in self._weights}
        saved = {param: tensor.to("cpu", copy=True) for param, tensor in weights.items()}
        try:
            with torch.no_grad():
                for part in self._weights:
                    values = strided_view(parameters[part.param], part)
                    parts = self._parts(part, values)
                    first = self._first(part.start)
                    values.copy_(dequantize(parts, self._fmt, part.shape, values.dtype, first))
            yield
        finally:
            for param, tensor in weights.items():
                tensor.detach().copy_(saved[param])

    def _first(self, start: Sequence[int]) -> tuple[int, int]:
        """Returns the row and column of `start` within its block."""
        return start[-2] % self._fmt.block[0], start[-1] % self._fmt.block[1]

    def _region(self, grid: Tensor, part: ShardSlice) -> Tensor:
        """Returns the part of a grid of scales that covers a slice of the weight."""
        rows, columns = (
            slice(first // size, -(-(first + count) // size))
            for first, count, size in zip(part.start, part.shape, self._fmt.block, strict=True)
        )
        return grid[rows, columns]
