"""Loads the pickles of a checkpoint without running code that a crafted one names.

    .metadata, records of a conversion    SafeUnpickler resolves the names in ALLOWED, and no other
    objects in *.distcp                   torch.load(weights_only=True), with numpy's names, for its random state
    common.pt                             Megatron-Core loads it with weights_only=True

torch.distributed.checkpoint 2.13 loads `.metadata` with pickle.load and objects with weights_only=False, without an
option. `install` replaces both for the process; delete it when torch loads both safely (test_pickles.py).
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

_DCP = "torch.distributed.checkpoint"
ALLOWED = {
    ("builtins", "set"), ("collections", "Counter"), ("collections", "OrderedDict"), ("pathlib", "PosixPath"),
    ("torch", "Size"), ("torch.serialization", "_get_layout"),
    (f"{_DCP}.filesystem", "_StorageInfo"), (f"{_DCP}.storage", "WriteResult"),
    *((f"{_DCP}.metadata", name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    *((f"{_DCP}.planner", name) for name in (
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    )),
}  # fmt: skip
_RECONSTRUCT: Any = np.zeros(1).__reduce__()[0]  # type: ignore[index]
NUMPY = [
    np.ndarray, np.dtype, type(np.dtype(np.uint32)),
    *((_RECONSTRUCT, f"numpy.{module}.multiarray._reconstruct") for module in ("core", "_core")),  # numpy 1 and 2
]  # fmt: skip


class UnsafePickleError(ValueError):
    """A pickle names a class or function that a checkpoint does not contain."""

    @classmethod
    def of(
        cls, file: object, name: str
    ) -> UnsafePickleError:  # no __init__: ranks send the error to each other
        return cls(
            f"{file} refers to {name}, which could run code, so it is not loaded; use another checkpoint"
        )


class SafeUnpickler(pickle.Unpickler):
    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)
        self._file = str(getattr(stream, "name", "a pickle"))

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in ALLOWED:
            return super().find_class(module, name)
        raise UnsafePickleError.of(self._file, f"{module}.{name}")


def load_pickle(stream: IO[bytes]) -> Any:
    return SafeUnpickler(stream).load()


def read_pickle(file: Path) -> Any:
    with file.open("rb") as stream:
        return load_pickle(stream)


def load_object(stream: IO[bytes], file: str) -> Any:
    """Loads what torch.save wrote. Raises ValueError, naming `file`."""
    try:
        with torch.serialization.safe_globals(NUMPY):
            value = torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if name := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise UnsafePickleError.of(file, name[1]) from None
        raise ValueError(f"{file} cannot be read ({str(error).partition('. ')[0]})") from None
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, torch.Tensor) and part.dtype == torch.uint8 and part.numel():
            raise ValueError(
                f"{file} has FP8 state, a pickle that Transformer Engine would load; train in bf16"
            )
    return value


def check_pickles(folder: Path) -> None:
    """Loads all but the tensors of a checkpoint. Raises ValueError naming the file that is unsafe or damaged."""
    file = folder / ".metadata"
    try:
        metadata = read_pickle(file)
        files = {path.name for path in folder.glob("*.distcp")}
        for index, place in metadata.storage_data.items():
            if place.relative_path not in files:
                raise ValueError(
                    f"{index.fqn} is in {place.relative_path}, which is not in the checkpoint"
                )
            if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
                file = folder / place.relative_path
                with file.open("rb") as stream:
                    stream.seek(place.offset)
                    load_object(io.BytesIO(stream.read(place.length)), str(file))
        file = folder / "common.pt"
        load_object(io.BytesIO(file.read_bytes()), str(file))
    except UnsafePickleError:
        raise
    except Exception as error:  # noqa: BLE001 (a damaged pickle fails in many ways)
        raise ValueError(f"{file.name} cannot be read ({error!r})") from None


def install() -> None:
    """Make torch.distributed.checkpoint load its pickles safely, in this process."""
    filesystem.pickle = SimpleNamespace(**{**vars(pickle), "load": load_pickle})  # type: ignore[assignment]
    original = DefaultLoadPlanner.load_bytes

    def load_bytes(planner: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
        assert planner.metadata is not None
        load_object(value, planner.metadata.storage_data[read_item.storage_index].relative_path)
        value.seek(0)
        original(planner, read_item, value)

    if original.__module__ != __name__:
        DefaultLoadPlanner.load_bytes = load_bytes  # type: ignore[method-assign]
