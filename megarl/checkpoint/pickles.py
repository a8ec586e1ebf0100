"""Loads the pickles of a checkpoint without running code that a crafted one names.

    .metadata, records of a conversion    SafeUnpickler resolves the names in ALLOWED, and no other
    objects in *.distcp                   torch.load(weights_only=True), with numpy's names
    common.pt                             Megatron-Core loads it with weights_only=True

torch.distributed.checkpoint 2.13 loads `.metadata` with pickle.load and objects with
weights_only=False, without an option. `install` replaces both for the process; delete it when torch
loads both safely (test_pickles.py).
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

ALLOWED = {
    "builtins.set",
    "collections.Counter",
    "collections.OrderedDict",
    "pathlib.PosixPath",
    "torch.Size",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.planner.BytesIOWriteData",
    "torch.distributed.checkpoint.planner.SavePlan",
    "torch.distributed.checkpoint.planner.TensorWriteData",
    "torch.distributed.checkpoint.planner.WriteItem",
    "torch.distributed.checkpoint.planner.WriteItemType",
    "torch.distributed.checkpoint.storage.WriteResult",
    "torch.serialization._get_layout",
}
_RECONSTRUCT: Any = np.zeros(1).__reduce__()[0]  # type: ignore[index]
NUMPY = [
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),  # numpy 1
    (_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),  # numpy 2
]


class UnsafePickleError(ValueError):
    """A pickle names a class or function that a checkpoint does not contain."""

    @classmethod
    def of(cls, file: object, name: str) -> UnsafePickleError:
        """Builds the error without an __init__, as ranks send it to each other."""
        return cls(
            f"{file} refers to {name}, which could run code, so it is not loaded; "
            "use another checkpoint"
        )


class SafeUnpickler(pickle.Unpickler):
    file = "a pickle"

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        path = f"{module}.{name}"
        if is_dtype or path in ALLOWED:
            return super().find_class(module, name)
        raise UnsafePickleError.of(self.file, path)


def load_pickle(stream: IO[bytes]) -> Any:
    unpickler = SafeUnpickler(stream)
    unpickler.file = getattr(stream, "name", unpickler.file)
    return unpickler.load()


def read_pickle(file: Path) -> Any:
    with file.open("rb") as stream:
        return load_pickle(stream)


def load_object(stream: IO[bytes], file: object) -> Any:
    """Loads what torch.save wrote. Raises ValueError, naming `file`."""
    try:
        with torch.serialization.safe_globals(NUMPY):
            value = torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        if name:
            raise UnsafePickleError.of(file, name[1]) from None
        raise ValueError(f"{file} cannot be read ({str(error).partition('. ')[0]})") from None
    parts = value
    if not isinstance(value, list):
        parts = [value]
    for part in parts:
        if isinstance(part, torch.Tensor) and part.dtype == torch.uint8 and part.numel():
            raise ValueError(
                f"{file} has FP8 state, a pickle that Transformer Engine would load; train in bf16"
            )
    return value


def check_pickles(folder: Path) -> None:
    """Loads all but the tensors of a checkpoint.

    Raises ValueError naming the file that is unsafe or damaged.
    """
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
                    load_object(io.BytesIO(stream.read(place.length)), file)
        file = folder / "common.pt"
        load_object(io.BytesIO(file.read_bytes()), file)
    except UnsafePickleError:
        raise
    except Exception as error:  # noqa: BLE001 (a damaged pickle fails in many ways)
        raise ValueError(f"{file.name} cannot be read ({error!r})") from None


def install() -> None:
    """Makes torch.distributed.checkpoint load its pickles safely, in this process."""
    storage: Any = filesystem
    storage.pickle = SimpleNamespace(**{**vars(pickle), "load": load_pickle})
    original = DefaultLoadPlanner.load_bytes

    def load_bytes(
        planner: DefaultLoadPlanner,
        read_item: ReadItem,
        value: io.BytesIO,
    ) -> None:
        assert planner.metadata is not None
        load_object(value, planner.metadata.storage_data[read_item.storage_index].relative_path)
        value.seek(0)
        original(planner, read_item, value)

    DefaultLoadPlanner.load_bytes = load_bytes  # type: ignore[method-assign]
