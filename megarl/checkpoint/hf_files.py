"""Writes Hugging Face folders: HfFile slice by slice, in any order; HfTarget is the files of a conversion."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megarl.checkpoint import hf_folder
from megarl.checkpoint.conversion_map import ConversionMap, OutputFile, Source
from megarl.checkpoint.hf_folder import (
    HfFolder,
    bytes_of,
    hf_source,
    lead_axis,
    split_by_size,
    without_pairs,
)
from megarl.models.headers import INDEX, ITEM_BYTES, read_headers
from megarl.models.hub import CODE, SMALL
from megarl.models.shards import ShardSlice, whole_tensor
from megarl.platform.atomic import write_atomic
from megarl.platform.json_text import parse_json
from megarl.weights.execute import strided_view
from megarl.weights.quantize import PLAIN, Storage


class HfFile:
    """A safetensors file that is written slice by slice. Several threads may write."""

    def __init__(self, file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Create the file for tensors of these dtypes (safetensors' names) and shapes, in this order."""
        header, end = {"__metadata__": {"format": "pt"}}, 0
        self._places: dict[str, tuple[int, tuple[int, ...]]] = {}  # offset and shape of each tensor
        for name, (dtype, shape) in tensors.items():
            begin, end = end, end + prod(shape) * ITEM_BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}  # type: ignore[dict-item]
            self._places[name] = begin, shape
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
        self._data = 8 + len(text)
        self._file = file.open("wb", buffering=0)
        self._write(memoryview(len(text).to_bytes(8, "little") + text), 0)

    def write(self, box: ShardSlice, parameter: Tensor) -> None:
        """Write the slice of `parameter` to [start, start + shape) of `box.name`, which is contiguous in the file."""
        begin, full = self._places[box.name]
        start, shape = without_pairs(box, len(full))
        elements = strided_view(parameter, box)
        assert shape[lead_axis(shape) + 1 :] == full[lead_axis(shape) + 1 :], (
            f"{box} is not contiguous in a tensor of shape {full}"
        )
        offset = self._data + begin + hf_folder.position(start, full) * elements.itemsize
        self._write(bytes_of(elements.contiguous()), offset)

    def close(self) -> None:
        """Flush to disk and close."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            count = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[count:], offset + count


class HfTarget:
    """Files of at most `file_bytes`, unless a single tensor or parameter is larger. `storage`: of quantised tensors."""

    def __init__(
        self,
        conversion_map: ConversionMap,
        source: Source,
        *,
        file_bytes: int,
        storage: Storage = PLAIN,
    ) -> None:
        self._map, self._storage = conversion_map, storage
        self._dtypes: dict[str, torch.dtype] = {}
        params: dict[
            str, list[str]
        ] = {}  # by first tensor: a layer's experts may share a tensor, hence a file
        for param, boxes in conversion_map.hf_slices.items():
            params.setdefault(boxes[0].name, []).append(param)
            self._dtypes |= dict.fromkeys([box.name for box in boxes], source.dtype(param))
        groups = split_by_size(
            params.values(), file_bytes, lambda group: self._nbytes(self._names(group))
        )
        self.files, self._tensors = [], {}
        for name, group in zip(file_names(len(groups)), groups, strict=True):
            members = [param for part in group for param in part]
            self._tensors[name] = self._names(members)
            self.files.append(OutputFile(name, tuple(members), self._nbytes(self._tensors[name])))

    def _names(self, params: list[str]) -> list[str]:
        return list(
            dict.fromkeys(box.name for param in params for box in self._map.hf_slices[param])
        )

    def _parts(self, names: list[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
        parts = (
            self._storage.parts(name, self._map.hf_shapes[name], self._dtypes[name])
            for name in names
        )
        return {name: part for stored in parts for name, part in stored.items()}

    def _nbytes(self, names: list[str]) -> int:
        return sum(prod(shape) * ITEM_BYTES[dtype] for dtype, shape in self._parts(names).values())

    def write(self, folder: Path, file: OutputFile, params: Iterator[tuple[str, Tensor]]) -> None:
        with closing(HfFile(folder / file.name, self._parts(self._tensors[file.name]))) as out:
            for param, flat in params:
                for box in self._map.hf_slices[param]:
                    if box.name not in self._storage.names:
                        out.write(box, flat)
                for name, index, matrix, _ in self._matrices(param, flat):
                    for part_name, part in self._storage.encode(name, matrix).items():
                        stacked = part.view(*(1 for _ in index), *part.shape)
                        box = whole_tensor(part_name, tuple(stacked.shape))
                        out.write(replace(box, start=(*index, *box.start[len(index) :])), stacked)

    def rounded(self, param: str, flat: Tensor) -> Tensor:
        """Returns the parameter as it will be read back."""
        result = flat
        for _, index, matrix, boxes in self._matrices(param, flat):
            result = flat.clone() if result is flat else result
            back = self._storage.round(matrix)
            for box in boxes:
                strided_view(result, box).copy_(_inside(back, box, len(index)))
        return result

    def _matrices(
        self, param: str, flat: Tensor
    ) -> Iterator[tuple[str, tuple[int, ...], Tensor, list[ShardSlice]]]:
        """Yields the quantised matrices that are in a parameter: the tensor, the matrix's index in it, and slices."""
        for name in (name for name in self._names([param]) if name in self._storage.names):
            boxes = [box for box in self._map.hf_slices[param] if box.name == name]
            *lead, rows, columns = self._map.hf_shapes[name]
            matrix = torch.empty(rows, columns, dtype=flat.dtype)
            for box in boxes:
                _inside(matrix, box, len(lead)).copy_(strided_view(flat, box))
            yield name, boxes[0].start[: len(lead)], matrix, boxes

    def finish(self, folder: Path, results: list[None]) -> None:
        write_index(folder)
        if not self._storage.names:
            drop_quantization(folder)

    def reopen(self, folder: Path) -> Source:
        written = HfFolder(folder)
        written.check(self._map.hf_shapes)
        return hf_source(self._map, written)


def file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_index(folder: Path) -> None:
    """Write the index of the folder's files, unless there is a single one."""
    tensors = read_headers(folder)
    weight_map = {name: tensor.file.name for name, tensor in tensors.items()}
    if len(set(weight_map.values())) > 1:
        values = {
            "metadata": {"total_size": sum(x.nbytes for x in tensors.values())},
            "weight_map": weight_map,
        }
        write_atomic(folder / INDEX, json.dumps(values, indent=2) + "\n")


def copy_model_files(source: Path, folder: Path) -> None:
    """Copy config, tokenizer and its code, but neither an index nor a Megatron checkpoint's metadata.json."""
    for file in (file for pattern in (*SMALL, *CODE) for file in source.glob(pattern)):
        if not file.name.endswith(".index.json") and file.name != "metadata.json":
            shutil.copyfile(file, folder / file.name)


def drop_quantization(folder: Path) -> None:
    """Remove `quantization_config` from a config.json whose weights are no longer quantised."""
    file = folder / "config.json"
    if file.is_file() and "quantization_config" in (values := dict(parse_json(file.read_bytes()))):
        del values["quantization_config"]
        write_atomic(file, json.dumps(values, indent=2) + "\n")


def _inside(matrix: Tensor, box: ShardSlice, lead: int) -> Tensor:
    """The slice as a view of its matrix, one of a tensor that has `lead` more dims."""
    start, shape = without_pairs(box, lead + 2)
    rows, columns = (slice(start[axis], start[axis] + shape[axis]) for axis in (lead, lead + 1))
    return matrix[rows, columns].view(box.shape)
