"""Locates the tensors of a Hugging Face folder from its index and the headers of its safetensors files. No torch.

A safetensors file is 8 bytes of header length, a JSON header, and the tensors' bytes end to end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

INDEX = "model.safetensors.index.json"
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HfTensor:
    file: Path
    offset: int  # of its first byte in the file
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, a key of ITEM_BYTES

    @property
    def end(self) -> int:
        return self.offset + prod(self.shape) * ITEM_BYTES[self.dtype]


@cache
def header_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the full shape of every tensor of the folder. Raises the ValueErrors of `read_headers`."""
    return {name: tensor.shape for name, tensor in read_headers(folder).items()}


def read_headers(folder: Path) -> dict[str, HfTensor]:
    """Returns every tensor of the files that the index lists, or of all *.safetensors if there is no index.

    Raises ValueError naming the file and tensor that are missing, damaged or truncated.
    """
    names: dict[str, str] = {}
    if (index := folder / INDEX).is_file():
        try:
            names = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise ValueError(f"{index} is not a valid index ({error}); copy the folder again") from None
    files = sorted(set(names.values())) or sorted(file.name for file in folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no *.safetensors; choose a Hugging Face folder with weights")
    tensors: dict[str, HfTensor] = {}
    for file in files:
        if not (folder / file).is_file():
            first = next(name for name, listed in names.items() if listed == file)
            raise ValueError(f"{folder / file}, which should contain {first}, is missing; copy the folder again")
        tensors |= _read_header(folder / file)
    for name, file in names.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ValueError(f"{folder / file} has no tensor {name}, though {INDEX} lists it; copy the folder again")
    return tensors


def _read_header(file: Path) -> dict[str, HfTensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{file} has {size} bytes and no complete header: it is truncated; copy it again")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors, ends = {}, {}
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                tensors[name] = HfTensor(file, 8 + length + begin, tuple(entry["shape"]), entry["dtype"])
                ends[name] = (8 + length + end, tensors[name].end)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} cannot be read as safetensors ({error!r}); copy it again") from None
    for name, (end, expected) in sorted(ends.items(), key=lambda item: item[1]):
        if end != expected:
            shape = tensors[name].shape
            raise ValueError(f"{file}: {name} of shape {shape} ends at byte {end}, not {expected}; copy it again")
        if end > size:
            raise ValueError(f"{file} has {size} bytes, but {name} ends at {end}: the file is truncated; copy it again")
    return tensors
