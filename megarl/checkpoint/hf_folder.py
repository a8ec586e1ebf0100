"""Reads Hugging Face folders slice by slice: no file is mapped into memory, and no tensor is read whole.

HfFolder: headers -> copy(slice)        load_hf: the slices of this rank -> its parameters
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megarl.checkpoint.conversion_map import ConversionMap, Source
from megarl.models.config_json import read_config
from megarl.models.formats import BlockFormat, as_stored, coarse, matrix_ranges
from megarl.models.headers import INDEX, read_headers
from megarl.models.shards import ShardSlice
from megarl.weights.execute import strided_view
from megarl.weights.quantize import DTYPES, PLAIN, Storage, dequantize

BLOCK_BYTES = 8 << 20
_PADDED = ("word_embeddings.weight", "output_layer.weight")  # the only parameters with padding rows
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NOT_WEIGHTS = (
    "rotary_emb.inv_freq",
    "input_scale",
    "input_global_scale",
)  # computed, or of the engine's activations
Item = TypeVar("Item")


class HfFolder:
    """A folder open for reading, also by several threads; weights in a block format are dequantised while they are
    read. Raises ValueError if it is incomplete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = read_headers(folder)
        self.format = read_config(folder / "config.json").quantization()
        self.quantized = self.format.tensors(self.tensors) if self.format else frozenset()
        self._handles = {
            file: os.open(file, os.O_RDONLY) for file in {t.file for t in self.tensors.values()}
        }

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", {}).values():
            os.close(handle)

    def check(
        self, shapes: Mapping[str, tuple[int, ...]], *, ignored: Collection[str] = ()
    ) -> None:
        """Raises ValueError, naming tensor and file, unless it has these tensors and no others except `ignored`."""
        index, expected = self.folder / INDEX, dict(shapes)
        for name in self.quantized.intersection(shapes):
            assert self.format is not None
            expected |= {
                name + suffix: size
                for suffix, (_, size) in self.format.parts(expected.pop(name)).items()
            }
        for name, shape in expected.items():
            tensor = self.tensors.get(name)
            if tensor is None:
                file = index if index.is_file() else self.folder / "model.safetensors"
                raise ValueError(
                    f"{file} has no tensor {name}, which config.json requires; copy the folder again"
                )
            if tensor.shape != shape and {*tensor.shape, *shape} != {1}:
                raise ValueError(
                    f"{tensor.file}: {name} has shape {tensor.shape}, but config.json requires {shape}"
                )
        for name, tensor in self.tensors.items():
            if name not in expected and name not in ignored and not name.endswith(NOT_WEIGHTS):
                raise ValueError(
                    f"{tensor.file}: {name} is not a tensor of the model that config.json describes"
                )

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if name in self.quantized else DTYPES[self.tensors[name].dtype]

    def storage(self) -> Storage:
        """How this folder's tensors are stored. Raises ValueError if no other weights can be stored so."""
        if self.format is None or not self.quantized:
            return PLAIN
        inputs = next((name for name in self.tensors if name.endswith(NOT_WEIGHTS[1:])), None)
        if inputs or self.format.global_scale:
            reason = (
                f"{inputs} was measured with other weights"
                if inputs
                else "fused layers share a global scale"
            )
            raise ValueError(f"{self.folder}: {reason}, so this model can only be exported in bf16")
        scale_dtype = self.tensors[next(iter(self.quantized)) + self.format.scale].dtype
        return Storage(replace(self.format, scale_dtype=scale_dtype), self.quantized)

    def copy(self, box: ShardSlice, parameter: Tensor) -> None:
        """Copies the slice to where it lies in `parameter`, block by block. Raises ValueError if the folder lacks the
        tensor or it is smaller."""
        if box.name in self.quantized and self.format is not None:
            dims = self._dims(box.name, self.format)
            for block in row_blocks(
                as_stored(box, self.format, dims), 16 * parameter.itemsize
            ):  # temporaries are fp32
                self._dequantize(block, strided_view(parameter, block), self.format)
            return
        if box.name not in self.tensors:
            raise ValueError(
                f"{self.folder} has no tensor {box.name}; use a folder with all *.safetensors files"
            )
        for block in row_blocks(box, parameter.itemsize):
            self._read(block, strided_view(parameter, block))

    def _dequantize(self, box: ShardSlice, target: Tensor, fmt: BlockFormat) -> None:
        """Fills `target` from a slice as it is stored: reads its items, and the scales of the blocks it touches."""
        lead, rows, columns = matrix_ranges(box, self._dims(box.name, fmt))
        step, (high, wide) = fmt.column_step, fmt.block
        whole = range(columns.start // step * step, -(-columns.stop // step) * step)
        items = coarse(whole, fmt.per_item)
        last = (
            (items,)
            if not fmt.is_transposed
            else (coarse(whole, wide), range(fmt.block[1] // fmt.per_item))
        )
        scales = self._rectangle(
            box.name + fmt.scale, *lead, coarse(rows, high), coarse(whole, wide)
        )
        parts = {fmt.scale: scales.view(-1, len(coarse(whole, wide)))}
        parts[fmt.values] = self._rectangle(box.name + fmt.values, *lead, rows, *last)
        if fmt.global_scale:
            parts[fmt.global_scale] = self._rectangle(box.name + fmt.global_scale)
        parts = {suffix: part.to(target.device) for suffix, part in parts.items()}
        start = (rows.start % high if high else 0, whole.start % wide if wide else 0)
        values = dequantize(parts, fmt, (len(rows), len(whole)), target.dtype, start)
        target.copy_(values[:, columns.start - whole.start :][:, : len(columns)].reshape(box.shape))

    def _dims(self, name: str, fmt: BlockFormat) -> int:
        return len(self.tensors[name + fmt.values].shape) - fmt.is_transposed

    def _rectangle(self, name: str, *ranges: range) -> Tensor:
        """Reads one range of each dim, or a tensor that has a single element."""
        tensor = self.tensors[name]
        if prod(tensor.shape) == 1:
            ranges = (range(1),) * len(tensor.shape)
        part = torch.empty([len(indices) for indices in ranges], dtype=DTYPES[tensor.dtype])
        first = tuple(indices.start for indices in ranges)
        self._read(ShardSlice(name, first, tuple(part.shape), name, 0, part.stride()), part)
        return part

    def _read(self, box: ShardSlice, target: Tensor) -> None:
        """Fills `target` from whole rows along the slice's lead axis, which are contiguous in the file."""
        tensor = self.tensors[box.name]
        start, shape, full = *without_pairs(box, len(tensor.shape)), tensor.shape
        if len(shape) != len(full) or any(
            first + n > size for first, n, size in zip(start, shape, full, strict=True)
        ):
            least = tuple(first + n for first, n in zip(start, shape, strict=True))
            raise ValueError(
                f"{tensor.file}: {box.name} has shape {full}, but config.json requires at least {least}"
            )
        lead = lead_axis(shape)
        rows, dtype = (*shape[lead : lead + 1], *full[lead + 1 :]), DTYPES[tensor.dtype]
        is_direct = (
            shape[lead:] == rows
            and target.is_contiguous()
            and target.is_cpu
            and target.dtype == dtype
        )
        buffer = target.view(rows) if is_direct else torch.empty(rows, dtype=dtype)
        offset = tensor.offset + position(start[: lead + 1], full) * dtype.itemsize
        memory = bytes_of(buffer)
        while memory:
            count = os.preadv(self._handles[tensor.file], [memory], offset)
            if not count:
                raise ValueError(
                    f"{tensor.file} ends within {box.name}: it was truncated while being read"
                )
            memory, offset = memory[count:], offset + count
        if not is_direct:
            inner = [
                slice(first, first + n)
                for first, n in zip(start[lead + 1 :], shape[lead + 1 :], strict=True)
            ]
            target.copy_(buffer[(slice(None), *inner)].reshape(box.shape))


@torch.no_grad()
def load_hf(
    parameters: Mapping[str, Tensor], slices: Iterable[ShardSlice], folder: str | Path
) -> None:
    """Fills `parameters`, by local Megatron names; padding rows of the vocabulary become zero, and a value head
    (`score.`) that the folder lacks stays as it is. Raises ValueError if another tensor is missing, has another shape
    or is quantised in an unknown format."""
    by_param: dict[str, list[ShardSlice]] = defaultdict(list)
    for part in slices:
        by_param[part.param].append(part)
    assert by_param.keys() == parameters.keys(), (
        f"slices and model differ: {by_param.keys() ^ parameters.keys()}"
    )
    source = HfFolder(Path(folder))
    for name, parameter in parameters.items():
        _assert_covered(name, parameter, by_param[name])
        if name.endswith(_PADDED):
            parameter.zero_()
        for part in by_param[name]:
            if part.name.startswith("score."):
                if part.name not in source.tensors:
                    continue
                source.check({part.name: part.shape}, ignored=source.tensors)
            if (
                part.name in source.tensors and source.dtype(part.name) not in _FLOATS
            ):  # quantised: it needs its scales
                stored = source.tensors[part.name].dtype
                raise ValueError(
                    f"{folder}: {part.name} is quantised ({stored}), but not as config.json's quantization_config "
                    "describes; use a bf16 copy of the model"
                )
            source.copy(part, parameter)


def _assert_covered(name: str, parameter: Tensor, slices: list[ShardSlice]) -> None:
    """Asserts that every element of a parameter comes from one HF element, and padding rows from none."""
    assert parameter.is_contiguous(), f"{name} is not contiguous"
    count = torch.zeros(parameter.shape, dtype=torch.int8, device="cpu")
    for part in slices:
        strided_view(count, part).add_(1)
    assert count.numel() == 0 or count.max() <= 1, f"{name}: an element is in two slices"
    if not name.endswith(_PADDED):
        assert count.numel() == 0 or count.min() == 1, f"{name}: an element is in no slice"


def hf_source(conversion_map: ConversionMap, folder: HfFolder) -> Source:
    """Raises ValueError if tensors that Megatron stores as one have different dtypes."""
    firsts: dict[str, str] = {}
    for param, boxes in conversion_map.stored.slices.items():
        for name in (box.name for box in conversion_map.hf_slices[param]):
            first = firsts.setdefault(boxes[0].name, name)
            if folder.dtype(name) != folder.dtype(first):
                raise ValueError(
                    f"{name} is {folder.dtype(name)} and {first} {folder.dtype(first)}, but Megatron stores both in "
                    f"{boxes[0].name}; convert them to the same dtype"
                )
    return Source(conversion_map, conversion_map.hf_slices, folder)


def row_blocks(box: ShardSlice, item_bytes: int, *, parts: int = 1) -> Iterator[ShardSlice]:
    """Split the slice into `parts` equal parts, and each into blocks of whole rows of at most BLOCK_BYTES."""
    axis = lead_axis(box.shape)
    rows = box.shape[axis]
    part, limit = -(-rows // parts), max(1, rows * BLOCK_BYTES // (box.numel * item_bytes))
    for first in range(0, rows, part):
        for begin in range(first, min(first + part, rows), limit):
            count = min(limit, first + part - begin, rows - begin)
            yield replace(
                box,
                start=(*box.start[:axis], box.start[axis] + begin, *box.start[axis + 1 :]),
                shape=(*box.shape[:axis], count, *box.shape[axis + 1 :]),
                offset=box.offset + begin * box.strides[axis],
            )


def split_by_size(
    items: Iterable[Item], limit: int, size_of: Callable[[Item], int]
) -> list[list[Item]]:
    """Consecutive groups of at most `limit` in total size; a larger item gets a group of its own."""
    groups: list[list[Item]] = []
    filled = limit
    for item in items:
        size = size_of(item)
        if not groups or filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += size
    return groups


def lead_axis(shape: Sequence[int]) -> int:
    """The first dim whose size is not 1; rows are counted along it."""
    return next((axis for axis, size in enumerate(shape) if size != 1), 0)


def position(start: Sequence[int], full: Sequence[int]) -> int:
    """Index of the element at `start` in a contiguous tensor of shape `full`; trailing indices default to 0."""
    return sum(first * prod(full[axis + 1 :]) for axis, first in enumerate(start))


def without_pairs(box: ShardSlice, dims: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, shape) in the tensor of a slice that may view its last dim as pairs, [..., n / 2, 2]."""
    if len(box.shape) != dims + 1:
        return box.start, box.shape
    return (*box.start[:-2], 2 * box.start[-2]), (*box.shape[:-2], 2 * box.shape[-2])


def bytes_of(contiguous: Tensor) -> memoryview:
    """The memory of a CPU tensor."""
    return memoryview(contiguous.view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
