"""Patches to the checkpoints of torch and Megatron-Core: PATCHES, `install` and `queue_of_a_write`.

Pickles are loaded without running code that a crafted pickle may name:

    .metadata, records of a conversion    SafeUnpickler only resolves dtypes and names in ALLOWED
    objects in *.distcp                   torch.load(weights_only=True), with numpy's names allowed
    common.pt                             Megatron-Core loads it with weights_only=True
"""

import io
import pickle
import queue
import re
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import torch

from megarl.patches.patch import Patch, replaced

_CHECKPOINT = "torch.distributed.checkpoint"
_TESTS = "unit/patches/test_checkpoints.py"
_NAMES = """
    builtins.set
    collections.Counter
    collections.OrderedDict
    pathlib.PosixPath
    torch.Size
    torch.distributed.checkpoint.filesystem._StorageInfo
    torch.distributed.checkpoint.metadata.BytesStorageMetadata
    torch.distributed.checkpoint.metadata.ChunkStorageMetadata
    torch.distributed.checkpoint.metadata.Metadata
    torch.distributed.checkpoint.metadata.MetadataIndex
    torch.distributed.checkpoint.metadata.StorageMeta
    torch.distributed.checkpoint.metadata.TensorProperties
    torch.distributed.checkpoint.metadata.TensorStorageMetadata
    torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    torch.distributed.checkpoint.planner.BytesIOWriteData
    torch.distributed.checkpoint.planner.SavePlan
    torch.distributed.checkpoint.planner.TensorWriteData
    torch.distributed.checkpoint.planner.WriteItem
    torch.distributed.checkpoint.planner.WriteItemType
    torch.distributed.checkpoint.storage.WriteResult
    torch.serialization._get_layout
"""
ALLOWED = set(_NAMES.split())
_RECONSTRUCT: Any = np.zeros(1).__reduce__()[0]  # type: ignore[index]
NUMPY = [
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),  # numpy 1
    (_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),  # numpy 2
]


class UnsafePickleError(ValueError):
    """Raised if a pickle names a class or function that no checkpoint needs."""

    @classmethod
    def of(cls, file: object, name: str) -> "UnsafePickleError":
        """Returns the error. It has no custom __init__, because ranks send it to each other."""
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


def load_object(stream: IO[bytes], file: object) -> Any:
    """Loads an object that torch.save wrote. Raises ValueError, naming `file`, if it is unsafe, has
    FP8 state or cannot be read.
    """
    try:
        with torch.serialization.safe_globals(NUMPY):
            value = torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        if name:
            raise UnsafePickleError.of(file, name[1]) from None
        raise ValueError(f"{file} cannot be read ({str(error).partition('. ')[0]})") from None
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if isinstance(part, torch.Tensor) and part.dtype == torch.uint8 and part.numel():
            raise ValueError(
                f"{file} has FP8 state, a pickle that Transformer Engine would load; train in bf16"
            )
    return value


def _load_bytes(original: Any, planner: Any, read_item: Any, value: io.BytesIO) -> None:
    load_object(value, planner.metadata.storage_data[read_item.storage_index].relative_path)
    value.seek(0)
    original(planner, read_item, value)


QUEUE = Patch(
    "megatron.core.dist_checkpointing.strategies.filesystem_async._results_queue",
    queue.Queue,
    "spawns a process on every rank for this queue; its writer and reader are threads here",
    versions="0.16.1, 0.19.2",
    delete_when="the queue is an argument",
    test=f"{_TESTS}::test_a_queue_has_a_process_of_its_own",
)
UNPICKLER = Patch(
    f"{_CHECKPOINT}.filesystem.pickle",
    SimpleNamespace(**{**vars(pickle), "load": load_pickle}),
    "loads .metadata with pickle.load; a crafted one runs code",
    versions="2.13",
    delete_when="torch loads it safely",
    test=f"{_TESTS}::test_torch_unpickles_metadata",
)
PATCHES = (
    QUEUE,
    UNPICKLER,
    replace(
        UNPICKLER,
        where=f"{_CHECKPOINT}.default_planner.DefaultLoadPlanner.load_bytes",
        replacement=_load_bytes,
        why="loads objects with weights_only=False, without an option",
        calls_original=True,
        test=f"{_TESTS}::test_torch_unpickles_objects",
    ),
)
_INSTALLED = ExitStack()


def install() -> None:
    """Makes torch.distributed.checkpoint load pickles safely in this process from now on."""
    _INSTALLED.enter_context(replaced(PATCHES[1:]))


def queue_of_a_write() -> AbstractContextManager[None]:
    """Gives the checkpoint write that begins within the context a separate queue."""
    return replaced([replace(QUEUE, replacement=queue.Queue())])
