"""Locates the tensors of a Hugging Face folder from its index and the headers of its safetensors
files. No torch.

A safetensors file is 8 bytes of header length, a JSON header, and the tensors' bytes end to end.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from megarl.models.shape import Shape, ShapesByName
from megarl.platform.json_text import parse_json, read_json

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
POINTER = b"version https"  # the start of a git-lfs pointer file
# safetensors dtype -> bytes per element
ITEM_BYTES = dict.fromkeys(["I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"], 1)
ITEM_BYTES |= {"F16": 2, "BF16": 2, "I16": 2, "F32": 4, "I32": 4, "F64": 8, "I64": 8}


@dataclass(frozen=True)
class HfTensor:
    file: Path
    offset: int  # of the first byte in the file
    shape: Shape
    dtype: str  # safetensors' name, a key of ITEM_BYTES

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@cache
def header_shapes(folder: Path) -> ShapesByName:
    """Returns the full shape of every tensor of the folder. Raises ValueError like
    `read_headers`."""
    return {name: tensor.shape for name, tensor in read_headers(folder).items()}


def read_headers(folder: Path) -> dict[str, HfTensor]:
    """Returns the model's tensors, from the files in the index; without an index, from
    model.safetensors; without that, from all *.safetensors.

    Raises ValueError, naming file and tensor, if a file is missing or damaged, or if transformers
    and vLLM would read different files.
    """
    for file in filter(Path.is_file, folder.glob("*")):
        with file.open("rb") as stream:
            if stream.read(len(POINTER)) == POINTER:
                raise ValueError(f"{file} is a pointer of git-lfs; run `git lfs pull` in {folder}")
    index = folder / INDEX
    whole = folder / WHOLE
    names = _read_index(index) if index.is_file() else {}
    files = sorted(set(names.values()) or (file.name for file in folder.glob("*.safetensors")))
    if WHOLE in files and not names:  # transformers reads no other file
        files = [WHOLE]
    if not files:
        raise ValueError(
            f"{folder} has no *.safetensors; choose a Hugging Face folder with weights"
        )
    for file in files:
        if os.path.isfile(folder / file):
            continue
        problem = " links to a file that does not exist"
        remedy = "copy the folder again"
        if names:
            listed = [name for name, other in names.items() if other == file]
            problem = f", which should contain {listed[0]}, is missing"
        if names and whole.is_file() and names.keys() <= _read_header(whole).keys():
            remedy = f"{WHOLE} has all tensors, so you can remove {INDEX}"
        raise ValueError(f"{folder / file}{problem}; {remedy}")
    if names and whole.is_file() and WHOLE not in files:
        raise ValueError(
            f"{folder} has {WHOLE}, which transformers reads, and {INDEX}, which vLLM reads and "
            "which does not list it; remove the one that is not the model"
        )
    tensors = {}
    for file in files:
        header = _read_header(folder / file)
        twice = min(tensors.keys() & header, default=None)
        if twice is not None:
            raise ValueError(
                f"{tensors[twice].file} and {folder / file} both contain {twice}; remove the file "
                "that is not the model's"
            )
        tensors |= header
    for name, file in names.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ValueError(
                f"{folder / file} has no tensor {name}, though {INDEX} lists it; copy the folder "
                "again"
            )
    return tensors


def check_tied(tensors: Mapping[str, HfTensor]) -> None:
    """Raises ValueError if a tied model's folder has a head that differs from its embedding."""
    head = tensors.get(HEAD)
    embedding = tensors.get(EMBEDDING)
    if head is None or embedding is None or _bytes_equal(head, embedding):
        return
    raise ValueError(
        f"{head.file}: {HEAD} differs from {EMBEDDING}, but config.json has "
        "tie_word_embeddings=true, with which vLLM ignores it; set that to false, or remove "
        f"{HEAD}"
    )


def _bytes_equal(*tensors: HfTensor) -> bool:
    first, second = (
        np.memmap(x.file, mode="r", offset=x.offset, shape=x.nbytes).data for x in tensors
    )
    return len({(x.shape, x.dtype) for x in tensors}) == 1 and first == second


def _read_index(index: Path) -> dict[str, str]:
    """Returns {tensor: file name}; the files are in the index's folder. Raises ValueError if the
    index is invalid."""
    try:
        names = read_json(index).get("weight_map")
        if not names:
            raise ValueError("it has no weight_map")
        for name, file in names.items():
            if not isinstance(file, str) or "/" in file or not file.endswith(".safetensors"):
                raise ValueError(
                    f"{name} is in {file!r}, which is not the name of a safetensors file"
                )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a valid index ({error}); copy the folder again") from None
    return names


def _read_header(file: Path) -> dict[str, HfTensor]:
    """Returns the tensors of a file. Raises ValueError if a dtype is not supported, or if the
    safetensors library finds that the tensors do not fill the file end to end."""
    try:
        safe_open(file, framework="numpy")
        with file.open("rb") as stream:
            data = 8 + int.from_bytes(stream.read(8), "little")
            header = parse_json(stream.read(data - 8), "the header")
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as safetensors ({error}); copy it again") from None
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in ITEM_BYTES:
            raise ValueError(
                f"{file}: {name} has dtype {entry['dtype']}, which is not supported; use a copy "
                "in bf16"
            )
        offset = data + entry["data_offsets"][0]
        tensors[name] = HfTensor(file, offset, tuple(entry["shape"]), entry["dtype"])
    return tensors
