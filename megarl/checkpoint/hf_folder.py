"""A Hugging Face folder's safetensors, by ranges of elements: nothing is mapped, nothing is read twice.

    HfFolder.open: index -> headers -> where each tensor's bytes lie      read: one range of one tensor
    HfFile:        what a file to be written will hold, and the header in front of it

The format is 8 bytes of header length, a JSON header, the tensors' bytes end to end.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["INDEX", "HfFile", "HfFolder", "bytes_of"]

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Place:
    file: Path
    at: int  # byte of the file
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.at + prod(self.shape) * self.dtype.itemsize


class HfFolder:
    """Every tensor of a folder. Reads are thread-safe."""

    def __init__(self, folder: Path, places: Mapping[str, _Place]) -> None:
        self.folder = folder
        self._places = places
        self._handles: dict[Path, int] = {}
        self._opening = threading.Lock()

    @classmethod
    def open(cls, folder: Path) -> HfFolder:
        """Raises ValueError naming file and tensor when one is cut off, damaged, or not where the index says."""
        index = folder / INDEX
        if index.is_file():
            try:
                where: dict[str, str] = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError) as error:
                raise ValueError(f"{index} is no index of tensors ({error}); copy the folder again") from None
        elif (folder / "model.safetensors").is_file():
            where = {}
        else:
            raise ValueError(f"{folder} holds neither {INDEX} nor model.safetensors; name a folder with the weights")
        places: dict[str, _Place] = {}
        for file in sorted(set(where.values())) or ["model.safetensors"]:
            if not (folder / file).is_file():
                first = next(name for name, held in where.items() if held == file)
                raise ValueError(f"{folder / file} is missing, which should hold {first}; copy the folder again")
            places |= _read_header(folder / file)
        for name, file in where.items():
            if name not in places or places[name].file.name != file:
                raise ValueError(
                    f"{folder / file} has no tensor {name}, where {INDEX} says it is; copy the folder again"
                )
        return cls(folder, places)

    def check(self, shapes: Mapping[str, tuple[int, ...]], *, skipped: Collection[str] = ()) -> None:
        """Exactly these tensors, in these shapes; `skipped` may be there.

        Raises ValueError naming the tensor and the file.
        """
        index = self.folder / INDEX
        for name, shape in shapes.items():
            place = self._places.get(name)
            if place is None:
                where = index if index.is_file() else self.folder / "model.safetensors"
                raise ValueError(f"{where} has no tensor {name}, which its config.json asks for; copy the folder again")
            if place.shape != shape:
                raise ValueError(f"{place.file}: {name} has shape {place.shape}, its config.json asks for {shape}")
        for name, place in self._places.items():
            if name not in shapes and name not in skipped:
                raise ValueError(f"{place.file}: {name} is no tensor of the model that its config.json describes")

    @property
    def names(self) -> Collection[str]:
        return self._places.keys()

    def dtype(self, name: str) -> torch.dtype:
        return self._places[name].dtype

    def read(self, name: str, at: int, into: Tensor) -> None:
        """Fill contiguous `into` [n] with the tensor's elements from `at`."""
        place = self._places[name]
        with self._opening:
            if place.file not in self._handles:
                self._handles[place.file] = os.open(place.file, os.O_RDONLY)
        memory, start = memoryview(bytes_of(into)), place.at + at * place.dtype.itemsize
        while memory:
            count = os.preadv(self._handles[place.file], [memory], start)
            if not count:
                raise ValueError(f"{place.file} ends within {name}: it was cut off while being read")
            memory, start = memory[count:], start + count

    def close(self) -> None:
        while self._handles:
            os.close(self._handles.popitem()[1])


def bytes_of(flat: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(flat.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def _read_header(file: Path) -> dict[str, _Place]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{file} has {size} bytes and no whole header: it was cut off; copy it again")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            places = {
                name: _Place(file, 8 + length + entry["data_offsets"][0], tuple(entry["shape"]), DTYPES[entry["dtype"]])
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} has no safetensors header ({error!r}); copy it again") from None
    for name, place in sorted(places.items(), key=lambda item: item[1].at):
        if place.end > size:
            raise ValueError(
                f"{file} has {size} bytes, {name} ends at {place.end}: the file was cut off; copy it again"
            )
        if place.end - place.at != header[name]["data_offsets"][1] - header[name]["data_offsets"][0]:
            raise ValueError(f"{file}: {name} of shape {place.shape} has another number of bytes; copy it again")
    return places


@dataclass(frozen=True)
class HfFile:
    """A file to be written: these tensors, in this order."""

    name: str
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    @property
    def header(self) -> bytes:
        found, at = {"__metadata__": {"format": "pt"}}, 0
        for name, (shape, dtype) in self.tensors.items():
            size = prod(shape) * dtype.itemsize
            found[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}  # type: ignore[dict-item]
            at += size
        text = json.dumps(found, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
        return len(text).to_bytes(8, "little") + text
