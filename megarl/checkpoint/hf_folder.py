"""Reads Hugging Face folders slice by slice: no file is mapped, and no tensor is read whole.

HfFolder: headers -> copy(slice)        load_hf: the slices of this rank -> its parameters
"""

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from operator import add, gt, mul
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megarl.checkpoint.conversion_map import ConversionMap, Shape, TensorSource
from megarl.models.config_json import read_config
from megarl.models.formats import CONFIG_KEY, as_stored, matrix_ranges
from megarl.models.headers import read_headers
from megarl.models.shards import ShardSlice, whole_tensor, without_pairs
from megarl.models.weights import ACTIVATION_SCALES, check_tensors
from megarl.weights.encode.quantize import DTYPES, PLAIN, Storage
from megarl.weights.sync.execute import strided_view

BLOCK_BYTES = 8 << 20
_PADDED = ("word_embeddings.weight", "output_layer.weight")  # the only parameters with padding rows
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Entry = TypeVar("Entry")


class HfFolder:
    """A Hugging Face folder that is open for reading. Several threads may read.

    Weights in a block format are decoded while they are read. Raises ValueError if the folder is
    incomplete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = read_headers(folder)
        fmt = read_config(folder / "config.json").block_format()
        self.storage = Storage(fmt, fmt.tensors(self.tensors)) if fmt else PLAIN
        files = {tensor.file for tensor in self.tensors.values()}
        self._files = {file: file.open("rb", buffering=0) for file in files}

    def check(self, shapes: Mapping[str, Shape], *, ignored: Collection[str] = ()) -> None:
        """Raises ValueError like `check_tensors`, unless the folder has tensors of these shapes."""
        stored = self.storage.block_format
        check_tensors(self.folder, self.tensors, shapes, stored, ignored=ignored)

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if name in self.storage.names else DTYPES[self.tensors[name].dtype]

    def export_storage(self) -> Storage:
        """Returns the storage of this folder's tensors, for an export of other weights.

        Raises ValueError if other weights cannot be stored in this format.
        """
        storage = self.storage
        if not storage.names:
            return PLAIN
        reasons = [
            f"{name} was measured with other weights"
            for name in self.tensors
            if name.endswith(ACTIVATION_SCALES)
        ]
        if storage.format.global_scale:
            reasons.append("fused layers share a global scale")
        if reasons:
            raise ValueError(
                f"{self.folder}: {reasons[0]}, so this model can only be exported in bf16"
            )
        scale_dtype = self.tensors[next(iter(storage.names)) + storage.format.scale].dtype
        return Storage(replace(storage.format, scale_dtype=scale_dtype), storage.names)

    def copy(self, box: ShardSlice, parameter: Tensor) -> None:
        """Copies the slice from the folder to its place in `parameter`, block by block.

        Raises ValueError if the folder's tensor is missing or too small.
        """
        if box.name in self.storage.names:
            fmt = self.storage.format
            dims = len(self.tensors[box.name + fmt.values].shape) - fmt.is_transposed
            stored = as_stored(box, fmt, dims)
            for block in row_blocks(stored, 16 * parameter.itemsize):  # temporaries are fp32
                target = strided_view(parameter, block)
                ranges = matrix_ranges(block, dims)
                values = self.storage.decode(box.name, ranges, self._rectangle, target)
                target.copy_(values.reshape(block.shape))
            return
        if box.name not in self.tensors:
            raise ValueError(
                f"{self.folder} has no tensor {box.name}; use a folder with all *.safetensors files"
            )
        for block in row_blocks(box, parameter.itemsize):
            self._read(block, strided_view(parameter, block))

    def _rectangle(self, name: str, *ranges: range) -> Tensor:
        """Returns one range per dim of a stored tensor; one of a single element is read whole."""
        tensor = self.tensors[name]
        if prod(tensor.shape) == 1:
            ranges = (range(1),) * len(tensor.shape)
        part = torch.empty(list(map(len, ranges)), dtype=DTYPES[tensor.dtype])
        start = tuple(indices.start for indices in ranges)
        self._read(replace(whole_tensor(name, tuple(part.shape)), start=start), part)
        return part

    def _read(self, box: ShardSlice, target: Tensor) -> None:
        """Fills `target` from whole rows along the slice's lead axis, contiguous in the file.

        Raises ValueError if the tensor is too small or its file is truncated.
        """
        tensor = self.tensors[box.name]
        full = tensor.shape
        start, shape = without_pairs(box, len(full))
        end = tuple(map(add, start, shape))
        if len(shape) != len(full) or any(map(gt, end, full)):
            raise ValueError(
                f"{tensor.file}: {box.name} has shape {full}, "
                f"but config.json requires at least {end}"
            )
        lead = lead_axis(shape)
        rows = (*shape[lead : lead + 1], *full[lead + 1 :])
        dtype = DTYPES[tensor.dtype]
        buffer = target
        is_plain = target.is_contiguous() and target.is_cpu and target.dtype == dtype
        if not is_plain or shape[lead:] != rows:
            buffer = torch.empty(rows, dtype=dtype)
        strides = [prod(full[axis + 1 :]) for axis in range(lead + 1)]
        offset = tensor.offset + sum(map(mul, start, strides)) * dtype.itemsize
        memory = buffer.view(-1).view(torch.uint8).numpy().data
        while memory:
            count = os.preadv(self._files[tensor.file].fileno(), [memory], offset)
            if not count:
                raise ValueError(
                    f"{tensor.file} ends within {box.name}: it was truncated while being read"
                )
            memory = memory[count:]
            offset += count
        if buffer is not target:
            inner = map(slice, start[lead + 1 :], end[lead + 1 :])
            target.copy_(buffer[(slice(None), *inner)].reshape(box.shape))


@torch.no_grad()
def load_hf(parameters: Mapping[str, Tensor], slices: Iterable[ShardSlice], folder: Path) -> None:
    """Fills `parameters` (local Megatron name -> tensor) from the folder.

    Padding rows of the vocabulary become zero. A value head (`score.`) that the folder lacks keeps
    its values. Raises ValueError if another tensor is missing, is too small or is quantised in an
    unknown format.
    """
    by_param = defaultdict(list)
    for part in slices:
        by_param[part.param].append(part)
    assert by_param.keys() == parameters.keys(), (
        f"slices and model differ: {by_param.keys() ^ parameters.keys()}"
    )
    source = HfFolder(folder)
    for name, parameter in parameters.items():
        assert parameter.is_contiguous(), f"{name} is not contiguous"
        # number of HF elements for each element of the parameter; 0 in padding rows
        count = torch.zeros(parameter.shape, dtype=torch.int8, device="cpu")
        for part in by_param[name]:
            strided_view(count, part).add_(1)
        assert (count <= 1).all(), f"{name}: an element is in two slices"
        if name.endswith(_PADDED):
            parameter.zero_()
        else:
            assert (count == 1).all(), f"{name}: an element is in no slice"
        for part in by_param[name]:
            if part.name.startswith("score."):
                if part.name not in source.tensors:
                    continue
                source.check({part.name: part.shape}, ignored=source.tensors)
            # a quantised tensor needs its scales
            if part.name in source.tensors and source.dtype(part.name) not in _FLOATS:
                stored = source.tensors[part.name].dtype
                raise ValueError(
                    f"{folder}: {part.name} is quantised ({stored}), but not as config.json's "
                    f"{CONFIG_KEY} describes; use a bf16 copy of the model"
                )
            source.copy(part, parameter)


def hf_source(conversion_map: ConversionMap, folder: HfFolder) -> TensorSource:
    """Returns the source that reads parameters from an HF folder.

    Raises ValueError if tensors that Megatron stores as one tensor have different dtypes.
    """
    firsts = {}
    for param, boxes in conversion_map.stored.slices.items():
        stored = boxes[0].name
        for box in conversion_map.hf_slices[param]:
            name = box.name
            first = firsts.setdefault(stored, name)
            if folder.dtype(name) != folder.dtype(first):
                raise ValueError(
                    f"{name} is {folder.dtype(name)} and {first} {folder.dtype(first)}, "
                    f"but Megatron stores both in {stored}; convert them to the same dtype"
                )
    return TensorSource(conversion_map, conversion_map.hf_slices, folder)


def row_blocks(
    box: ShardSlice,
    item_bytes: int,
    *,
    parts: int = 1,
) -> Iterator[ShardSlice]:
    """Splits a slice into `parts` equal parts, each into blocks of rows of at most BLOCK_BYTES."""
    rows = box.shape[lead_axis(box.shape)]
    part = -(-rows // parts)
    limit = max(1, rows * BLOCK_BYTES // (box.numel * item_bytes))
    for first in range(0, rows, part):
        for begin in range(first, min(first + part, rows), limit):
            yield rows_of(box, begin, min(limit, first + part - begin, rows - begin))


def rows_of(box: ShardSlice, first: int, count: int) -> ShardSlice:
    """Returns rows [first, first + count) of a slice."""
    axis = lead_axis(box.shape)
    start = list(box.start)
    start[axis] += first
    shape = list(box.shape)
    shape[axis] = count
    offset = box.offset + first * box.strides[axis]
    return replace(box, start=tuple(start), shape=tuple(shape), offset=offset)


def split_by_size(
    items: Iterable[Entry],
    limit: int,
    size_of: Callable[[Entry], int],
) -> list[list[Entry]]:
    """Returns consecutive groups of at most `limit` in total size; a larger item stays alone."""
    groups = []
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
    """Returns the first dim whose size is not 1; rows are counted along it."""
    for axis, size in enumerate(shape):
        if size != 1:
            return axis
    return 0
