"""Megarl's own hand on Megatron's `torch_dist` format: chunks written and read one at a time, by one process.

    write_chunk ..., then finish      Reader: open, check(slots), read(slot), one chunk in memory

On disk: `*.distcp` hold `torch.save`d chunks end to end, `.metadata` says which rectangle of which tensor lies where
(torch.distributed.checkpoint's own classes), `metadata.json` and `common.pt` are Megatron's. What is written here is
read by `megatron.core.dist_checkpointing.load` in any layout, and what that saves is read here.
"""

from __future__ import annotations

import io
import json
import pickle
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megarl.checkpoint.slots import Slot

__all__ = ["Chunk", "Reader", "finish", "is_checkpoint", "write_chunk"]

CACHE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """One `torch.save`d rectangle: where it lies in its tensor, and in which bytes of which file."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    at: int
    length: int


def is_checkpoint(folder: Path) -> bool:
    return (folder / "metadata.json").is_file() and (folder / ".metadata").is_file()


def write_chunk(stream: BinaryIO, slot: Slot, flat: Tensor, file: str) -> Chunk:
    """`flat` [numel] as `slot`'s rectangle, at the end of `stream`."""
    at = stream.tell()
    assert flat.untyped_storage().nbytes() == flat.nbytes, "a view would save what it views"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # bytes are compared with the source; torch.load does not look
    try:
        torch.save(flat.view(slot.shape), stream)
    finally:
        torch.serialization.set_crc32_options(before)
    return Chunk(slot.key, slot.offset, slot.shape, file, at, stream.tell() - at)


def finish(folder: Path, chunks: Sequence[Chunk], wholes: Mapping[str, Any], objects: Iterable[str]) -> None:
    """The files that make `folder` a checkpoint. `wholes`: key -> (shape, dtype)."""
    tensors: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    places: dict[MetadataIndex, _StorageInfo] = {}
    for chunk in chunks:
        tensors[chunk.key].append(ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)))
        places[MetadataIndex(chunk.key, chunk.offset)] = _StorageInfo(chunk.file, chunk.at, chunk.length)
    described: dict[str, Any] = {
        key: TensorStorageMetadata(TensorProperties(dtype=wholes[key][1]), torch.Size(wholes[key][0]), found)
        for key, found in tensors.items()
    }
    empty = io.BytesIO()
    torch.save([None], empty)  # a layer's other state: nothing yet
    file, at = "objects.distcp", 0
    with (folder / file).open("wb") as stream:
        for name in objects:
            stream.write(empty.getvalue())
            described[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = _StorageInfo(file, at, len(empty.getvalue()))
            at += len(empty.getvalue())
    torch.save({}, folder / "common.pt")
    (folder / "metadata.json").write_text(
        json.dumps(
            {
                "sharded_backend": "torch_dist",
                "sharded_backend_version": 1,
                "common_backend": "torch",
                "common_backend_version": 1,
            }
        )
    )
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(described, None, places)))


class Reader:
    """One checkpoint's tensors, rectangle by rectangle. Several threads may read, each with its own cache."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = FileSystemReader(folder).read_metadata()
        self._places: dict[MetadataIndex, _StorageInfo] = self._metadata.storage_data
        self._chunks: dict[tuple[str, tuple[int, ...]], list[ChunkStorageMetadata]] = defaultdict(list)
        self._cache = _Cache()
        self.tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            key: (tuple(found.size), found.properties.dtype)
            for key, found in self._metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }

    def check(self, slots: Iterable[Slot]) -> None:
        """Every slot is there, in its shape, in files that are long enough.

        Raises ValueError naming the tensor and the file.
        """
        sizes = {file.name: file.stat().st_size for file in self._folder.glob("*.distcp")}
        stacked = {slot.key: slot for slot in slots}
        for key, slot in stacked.items():
            if key not in self.tensors:
                raise ValueError(f"{self._folder / '.metadata'} has no tensor {key}; is it another model's checkpoint?")
            shape, axis = self.tensors[key][0], slot.stacked
            if shape != slot.whole and not (slot.may_be_padded and shape[1:] == slot.whole[1:]):
                raise ValueError(
                    f"{self._folder / '.metadata'}: {key} has shape {shape}, config.json asks for {slot.whole}"
                )
            found: Any = self._metadata.state_dict_metadata[key]
            if sum(prod(chunk.sizes) for chunk in found.chunks) != prod(shape):
                raise ValueError(
                    f"{self._folder / '.metadata'}: the chunks of {key} do not add up to its shape {shape}"
                )
            for chunk in found.chunks:
                place = self._places[MetadataIndex(key, chunk.offsets)]
                if sizes.get(place.relative_path, -1) < place.offset + place.length:
                    raise ValueError(
                        f"{self._folder / place.relative_path} has {sizes.get(place.relative_path, 0)} bytes, {key} at "
                        f"{tuple(chunk.offsets)} ends at {place.offset + place.length}: the file is cut off or missing"
                    )
                self._chunks[key, tuple(chunk.offsets[:axis])].append(chunk)
        known = ("optimizer.",)
        for key in self.tensors:
            if key not in stacked and not key.startswith(known):
                raise ValueError(f"{self._folder / '.metadata'}: tensor {key} is none of this model's")

    def read(self, slot: Slot) -> Tensor:
        """The slot's rectangle, [slot.numel], not to be written to; zeros pad it. `check` must have been called."""
        whole, found = None, 0
        for chunk in self._chunks[slot.key, slot.offset[: slot.stacked]]:
            start = tuple(map(max, slot.offset, chunk.offsets))
            ends = zip(slot.offset, slot.shape, chunk.offsets, chunk.sizes, strict=True)
            stop = tuple(min(a + n, b + m) for a, n, b, m in ends)
            if any(a >= b for a, b in zip(start, stop, strict=True)):
                continue
            here = tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, slot.offset, strict=True))
            there = tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, chunk.offsets, strict=True))
            part = self._load(MetadataIndex(slot.key, chunk.offsets)).view(tuple(chunk.sizes))[there]
            if part.numel() == slot.numel and part.is_contiguous():
                return part.reshape(-1)
            whole = torch.zeros(slot.shape, dtype=part.dtype) if whole is None else whole
            whole[here].copy_(part)
            found += part.numel()
        if found != slot.numel and not slot.may_be_padded:
            raise ValueError(
                f"{self._folder / '.metadata'}: {slot.key} has {found} of {slot.numel} elements at {slot.offset}"
            )
        return torch.zeros(slot.numel, dtype=self.tensors[slot.key][1]) if whole is None else whole.view(-1)

    def _load(self, index: MetadataIndex) -> Tensor:
        loaded = self._cache.tensors
        if index in loaded:
            loaded.move_to_end(index)
            return loaded[index]
        place = self._places[index]
        file = self._folder / place.relative_path
        with file.open("rb") as stream:
            try:
                view: Any = _View(stream, place.offset, place.length)
                tensor = torch.load(view, map_location="cpu", weights_only=True)
            except Exception as error:  # a damaged chunk fails in as many ways as a zip file can
                raise ValueError(
                    f"{file}: {index.fqn} at {tuple(index.offset or ())} cannot be read ({error})"
                ) from error
        while loaded and sum(x.nbytes for x in loaded.values()) + tensor.nbytes > CACHE_BYTES:
            loaded.popitem(last=False)
        loaded[index] = tensor
        return tensor


class _Cache(threading.local):
    def __init__(self) -> None:
        self.tensors: OrderedDict[MetadataIndex, Tensor] = OrderedDict()


class _View(io.RawIOBase):
    """`length` bytes of a file from `at`, as a file of its own."""

    def __init__(self, file: BinaryIO, at: int, length: int) -> None:
        self._file, self._at, self._length, self._here = file, at, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._here

    def seek(self, offset: int, whence: int = 0) -> int:
        self._here = offset + (0, self._here, self._length)[whence]
        return self._here

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._here)]
        self._file.seek(self._at + self._here)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._here += count
        return count
