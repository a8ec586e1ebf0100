"""Where the tensors of a Hugging Face folder lie, from its index and the headers of its safetensors files.

A safetensors file is 8 bytes of header length, a JSON header, and the tensors' bytes end to end. No torch here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

__all__ = ["INDEX", "ITEM_BYTES", "HfTensor", "header_shapes", "read_headers"]

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
    """Full shape of every tensor of the folder. Raises ValueError as `read_headers` does."""
    return {name: tensor.shape for name, tensor in read_headers(folder).items()}


def read_headers(folder: Path) -> dict[str, HfTensor]:
    """Every tensor of the files that the index names, or of all *.safetensors where there is no index.

    Raises ValueError naming the file, and the tensor, that is missing, damaged or cut off.
    """
    names: dict[str, str] = {}
    index = folder / INDEX
    if index.is_file():
        try:
            names = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise ValueError(f"{index} cannot be read as an index ({error}); copy the folder again") from None
    files = sorted(set(names.values())) or sorted(file.name for file in folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors; name a Hugging Face folder with its weights")
    tensors: dict[str, HfTensor] = {}
    for file in files:
        if not (folder / file).is_file():
            first = next(name for name, listed in names.items() if listed == file)
            raise ValueError(f"{folder / file} is missing, which should hold {first}; copy the folder again")
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
            raise ValueError(f"{file} has {size} bytes and no complete header: it was cut off; copy it again")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors, sizes = {}, {}
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                tensors[name] = HfTensor(file, 8 + length + begin, tuple(entry["shape"]), entry["dtype"])
                sizes[name] = (end - begin, tensors[name].end - tensors[name].offset)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} cannot be read as safetensors ({error!r}); copy it again") from None
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        stored, expected = sizes[name]
        if stored != expected:
            raise ValueError(
                f"{file}: {name} of shape {tensor.shape} has {stored} bytes, not {expected}; copy it again"
            )
        if tensor.end > size:
            raise ValueError(
                f"{file} has {size} bytes, {name} ends at {tensor.end}: the file was cut off; copy it again"
            )
    return tensors
