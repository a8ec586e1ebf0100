"""FP8 blocks of a trainer's weights: scales that all ranks agree on, and slices quantised while
they are packed.

    parameters --largest magnitude per block--> max over the ranks that share a tensor --> scales,
        the same on each
    slice of a parameter, scales --encode--> bytes of the engine's FP8 weight; no copy of a
        parameter exists

A block may be cut between tensor-parallel ranks, so the maximum is taken over them first: one
all-reduce of a number per block. `through_fp8` shows the trainer what the engine has."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.models.formats import BlockFormat
from megarl.models.fp8 import SCALE
from megarl.models.shards import Slices
from megarl.weights.encode.quantize import block_amax, fp8_scales, from_fp8, to_fp8
from megarl.weights.sync.execute import Parameters, strided_view
from megarl.weights.sync.publish import WeightSender

# in place, to the max over the ranks that share dense weights, or experts
Reduce = Callable[[Tensor, bool], None]


class Fp8Quantizer:
    """execute.Encoder. `slices`: this rank's, of weights and scales. `reduce_max`: a collective of
    the trainer."""

    def __init__(
        self,
        slices: Slices,
        fmt: BlockFormat,
        reduce_max: Reduce,
    ) -> None:
        self._slices = slices
        self._fmt = fmt
        self._reduce_max = reduce_max
        self._grids = {
            part.name.removesuffix(SCALE): part for part in slices if part.name.endswith(SCALE)
        }
        self._weights = [part for part in slices if part.name in self._grids]
        self._scales = {}  # by the name of the weight
        self.names = frozenset(self._grids)

    def sender(self, parameters: Callable[[], Parameters]) -> WeightSender:
        return WeightSender(self._slices, lambda: self.measure(parameters()), self)

    @torch.no_grad()
    def measure(self, parameters: Parameters) -> dict[str, Tensor]:
        """A collective. Returns the parameters, and the scales of the current weights by their
        slices' `param`."""
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
                    region = self._region(amax[part.name], part.start, part.shape)
                    region.copy_(torch.maximum(found, region))
            self._reduce_max(flat, is_expert)
            for name, values in amax.items():
                self._scales[name] = fp8_scales(values)
        scales = {part.param: self._scales[name] for name, part in self._grids.items()}
        return {**parameters, **scales}

    def encode(
        self,
        name: str,
        start: Sequence[int],
        values: Tensor,
    ) -> Tensor:
        """Returns [start, start + values.shape) of the weight `name` as the engine keeps it, a byte
        an element."""
        scales = self._region(self._scales[name], start, values.shape)
        return to_fp8(values, scales, self._fmt.block, self._first(start)).view(torch.uint8)

    @contextmanager
    def through_fp8(self, parameters: Parameters) -> Iterator[None]:
        """A collective. Within it, the weights have the values that the engine's have."""
        self.measure(parameters)
        block = self._fmt.block
        weights = {part.param: parameters[part.param].detach() for part in self._weights}
        saved = {param: tensor.to("cpu", copy=True) for param, tensor in weights.items()}
        try:
            with torch.no_grad():
                for part in self._weights:
                    values = strided_view(parameters[part.param], part)
                    scales = self._region(self._scales[part.name], part.start, part.shape)
                    first = self._first(part.start)
                    rounded = to_fp8(values, scales, block, first)
                    values.copy_(
                        from_fp8(
                            rounded,
                            scales,
                            block,
                            values.dtype,
                            first,
                        )
                    )
            yield
        finally:
            for param, tensor in weights.items():
                tensor.detach().copy_(saved[param])

    def _first(self, start: Sequence[int]) -> tuple[int, int]:
        """Returns the row and column of `start` within its block."""
        return start[-2] % self._fmt.block[0], start[-1] % self._fmt.block[1]

    def _region(
        self,
        grid: Tensor,
        start: Sequence[int],
        shape: Sequence[int],
    ) -> Tensor:
        """Returns the part of a grid of scales that covers [start, start + shape)."""
        rows, columns = (
            slice(first // size, -(-(first + count) // size))
            for first, count, size in zip(start, shape, self._fmt.block, strict=True)
        )
        return grid[rows, columns]
