"""Reads and writes Hugging Face folders slice by slice: no file is mapped into memory, and no tensor is read whole.

HfFolder: headers -> copy(slice)        HfFile: header -> write(slice), in any order
HfTarget: the files of a conversion     load_hf: the slices of this rank -> its parameters
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megarl.checkpoint.conversion_map import ConversionMap, OutputFile, Source
from megarl.models.headers import INDEX, read_headers
from megarl.models.hub import CODE, SMALL
from megarl.models.shards import ShardSlice
from megarl.platform.atomic import write_atomic

BLOCK_BYTES = 8 << 20
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PADDED = ("word_embeddings.weight", "output_layer.weight")  # the only parameters with padding rows
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Item = TypeVar("Item")


class HfFolder:
    """A folder open for reading, by several threads if needed. Raises ValueError if it is incomplete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = read_headers(folder)
        self._handles = {file: os.open(file, os.O_RDONLY) for file in {t.file for t in self.tensors.values()}}

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", {}).values():
            os.close(handle)

    def check(self, shapes: Mapping[str, tuple[int, ...]], *, ignored: Collection[str] = ()) -> None:
        """Raises ValueError, naming tensor and file, unless it has these tensors and no others except `ignored`."""
        index = self.folder / INDEX
        for name, shape in shapes.items():
            tensor = self.tensors.get(name)
            if tensor is None:
                file = index if index.is_file() else self.folder / "model.safetensors"
                raise ValueError(f"{file} has no tensor {name}, which config.json requires; copy the folder again")
            if tensor.shape != shape:
                raise ValueError(f"{tensor.file}: {name} has shape {tensor.shape}, but config.json requires {shape}")
        for name, tensor in self.tensors.items():
            if name not in shapes and name not in ignored:
                raise ValueError(f"{tensor.file}: {name} is not a tensor of the model that config.json describes")

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.tensors[name].dtype]

    def copy(self, box: ShardSlice, parameter: Tensor) -> None:
        """Copy [start, start + shape) of tensor `box.name` to where it lies in `parameter`, block by block.

        Raises ValueError if the folder lacks the tensor or it is smaller.
        """
        if box.name not in self.tensors:
            raise ValueError(f"{self.folder} has no tensor {box.name}; use a folder with all *.safetensors files")
        for block in row_blocks(box, parameter.itemsize):
            self._read(block, view(parameter, block))

    def _read(self, box: ShardSlice, target: Tensor) -> None:
        """Fills `target` from whole rows along the slice's lead axis, which are contiguous in the file."""
        tensor = self.tensors[box.name]
        start, shape, full = *_without_pairs(box, len(tensor.shape)), tensor.shape
        if len(shape) != len(full) or any(first + n > size for first, n, size in zip(start, shape, full, strict=True)):
            least = tuple(first + n for first, n in zip(start, shape, strict=True))
            raise ValueError(f"{tensor.file}: {box.name} has shape {full}, but config.json requires at least {least}")
        lead = lead_axis(shape)
        rows, dtype = (*shape[lead : lead + 1], *full[lead + 1 :]), self.dtype(box.name)
        is_direct = shape[lead:] == rows and target.is_contiguous() and target.is_cpu and target.dtype == dtype
        buffer = target.view(rows) if is_direct else torch.empty(rows, dtype=dtype)
        offset = tensor.offset + _position(start[: lead + 1], full) * dtype.itemsize
        memory = _bytes_of(buffer)
        while memory:
            count = os.preadv(self._handles[tensor.file], [memory], offset)
            if not count:
                raise ValueError(f"{tensor.file} ends within {box.name}: it was truncated while being read")
            memory, offset = memory[count:], offset + count
        if not is_direct:
            inner = [slice(first, first + n) for first, n in zip(start[lead + 1 :], shape[lead + 1 :], strict=True)]
            target.copy_(buffer[(slice(None), *inner)].reshape(box.shape))


class HfFile:
    """A safetensors file that is written slice by slice. Several threads may write."""

    def __init__(self, file: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Create the file for tensors of these shapes and dtypes, in this order."""
        header, end = {"__metadata__": {"format": "pt"}}, 0
        self._offsets: dict[str, int] = {}
        self._shapes = {name: shape for name, (shape, _) in tensors.items()}
        for name, (shape, dtype) in tensors.items():
            begin, end = end, end + prod(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}  # type: ignore[dict-item]
            self._offsets[name] = begin
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
        self._data = 8 + len(text)
        self._file = file.open("wb", buffering=0)
        self._write(memoryview(len(text).to_bytes(8, "little") + text), 0)

    def write(self, box: ShardSlice, parameter: Tensor) -> None:
        """Write the slice of `parameter` to [start, start + shape) of `box.name`, which is contiguous in the file."""
        full = self._shapes[box.name]
        start, shape = _without_pairs(box, len(full))
        elements = view(parameter, box)
        assert shape[lead_axis(shape) + 1 :] == full[lead_axis(shape) + 1 :], (
            f"{box} is not contiguous in a tensor of shape {full}"
        )
        offset = self._offsets[box.name] + _position(start, full) * elements.itemsize
        self._write(_bytes_of(elements.contiguous()), self._data + offset)

    def close(self) -> None:
        """Flush to disk and close."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            count = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[count:], offset + count


@torch.no_grad()
def load_hf(parameters: Mapping[str, Tensor], slices: Iterable[ShardSlice], folder: str | Path) -> None:
    """Fill `parameters` (local Megatron names) from `folder`; padding rows of the vocabulary become zero.

    A value head (`score.`) that the folder lacks stays as it is. Raises ValueError if another tensor is missing, or
    one has another shape or is quantised.
    """
    by_param: dict[str, list[ShardSlice]] = defaultdict(list)
    for part in slices:
        by_param[part.param].append(part)
    assert by_param.keys() == parameters.keys(), f"slices and model differ: {by_param.keys() ^ parameters.keys()}"
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
            if part.name in source.tensors and source.dtype(part.name) not in _FLOATS:  # quantised: it needs its scales
                stored = source.tensors[part.name].dtype
                raise ValueError(f"{folder}: {part.name} is quantised ({stored}); use a bf16 copy of the model")
            source.copy(part, parameter)


def _assert_covered(name: str, parameter: Tensor, slices: list[ShardSlice]) -> None:
    """Asserts that every element of a parameter comes from one HF element, and padding rows from none."""
    assert parameter.is_contiguous(), f"{name} is not contiguous"
    count = torch.zeros(parameter.shape, dtype=torch.int8, device="cpu")
    for part in slices:
        view(count, part).add_(1)
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


class HfTarget:
    """Files of at most `file_bytes`, unless a single tensor or parameter is larger."""

    def __init__(self, conversion_map: ConversionMap, source: Source, *, file_bytes: int) -> None:
        self._map = conversion_map
        self._dtypes: dict[str, torch.dtype] = {}
        params: dict[str, list[str]] = {}  # by first tensor: a layer's experts may share a tensor, hence a file
        for param, boxes in conversion_map.hf_slices.items():
            params.setdefault(boxes[0].name, []).append(param)
            self._dtypes |= dict.fromkeys([box.name for box in boxes], source.dtype(param))
        groups = split_by_size(params.values(), file_bytes, lambda group: self._nbytes(self._names(group)))
        self.files, self._tensors = [], {}
        for name, group in zip(file_names(len(groups)), groups, strict=True):
            members = [param for part in group for param in part]
            self._tensors[name] = self._names(members)
            self.files.append(OutputFile(name, tuple(members), self._nbytes(self._tensors[name])))

    def _names(self, params: list[str]) -> list[str]:
        return list(dict.fromkeys(box.name for param in params for box in self._map.hf_slices[param]))

    def _nbytes(self, names: list[str]) -> int:
        return sum(prod(self._map.hf_shapes[name]) * self._dtypes[name].itemsize for name in names)

    def write(self, folder: Path, file: OutputFile, params: Iterator[tuple[str, Tensor]]) -> None:
        tensors = {name: (self._map.hf_shapes[name], self._dtypes[name]) for name in self._tensors[file.name]}
        with closing(HfFile(folder / file.name, tensors)) as out:
            for param, flat in params:
                for box in self._map.hf_slices[param]:
                    out.write(box, flat)

    def finish(self, folder: Path, results: list[None]) -> None:
        write_index(folder, self._tensors, sum(file.nbytes for file in self.files))

    def reopen(self, folder: Path) -> Source:
        written = HfFolder(folder)
        written.check(self._map.hf_shapes)
        return hf_source(self._map, written)


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


def split_by_size(items: Iterable[Item], limit: int, size_of: Callable[[Item], int]) -> list[list[Item]]:
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


def file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_index(folder: Path, files: Mapping[str, Sequence[str]], total_bytes: int) -> None:
    """Write the index of `files` (name -> tensors), unless there is a single file."""
    if len(files) > 1:
        weight_map = {tensor: file for file, tensors in files.items() for tensor in tensors}
        values = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_atomic(folder / INDEX, json.dumps(values, indent=2) + "\n")


def copy_model_files(source: Path, folder: Path) -> None:
    """Copy config, tokenizer and its code, but neither an index nor a Megatron checkpoint's metadata.json."""
    for file in (file for pattern in (*SMALL, *CODE) for file in source.glob(pattern)):
        if not file.name.endswith(".index.json") and file.name != "metadata.json":
            shutil.copyfile(file, folder / file.name)


def view(parameter: Tensor, box: ShardSlice) -> Tensor:
    """The slice as a view of a contiguous parameter."""
    return parameter.as_strided(box.shape, box.strides, parameter.storage_offset() + box.offset)


def lead_axis(shape: Sequence[int]) -> int:
    """The first dim whose size is not 1; rows are counted along it."""
    return next((axis for axis, size in enumerate(shape) if size != 1), 0)


def _position(start: Sequence[int], full: Sequence[int]) -> int:
    """Index of the element at `start` in a contiguous tensor of shape `full`; trailing indices default to 0."""
    return sum(first * prod(full[axis + 1 :]) for axis, first in enumerate(start))


def _without_pairs(box: ShardSlice, dims: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, shape) in the tensor of a slice that may view its last dim as pairs, [..., n / 2, 2]."""
    if len(box.shape) != dims + 1:
        return box.start, box.shape
    return (*box.start[:-2], 2 * box.start[-2]), (*box.shape[:-2], 2 * box.shape[-2])


def _bytes_of(contiguous: Tensor) -> memoryview:
    """The memory of a CPU tensor."""
    return memoryview(contiguous.view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
