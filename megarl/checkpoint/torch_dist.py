"""Megarl's own hand on Megatron's `torch_dist` format: chunks written and read one at a time, by one process.

    model on meta --slots_of--> Slot (elements of a parameter <-> rectangle of a checkpoint tensor)
    write_chunk, write_objects, then finish      Reader: open, read(slot), one chunk in memory

On disk: `*.distcp` hold `torch.save`d chunks end to end, `.metadata` says which rectangle of which tensor lies where
(torch.distributed.checkpoint's own classes), `metadata.json` and `common.pt` are Megatron's. What is written here is
read by `megatron.core.dist_checkpointing.load` in any layout, and what that saves is read here.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

__all__ = ["Chunk", "Reader", "Slot", "finish", "is_checkpoint", "load_weights", "slots_of", "write_chunk"]

CACHE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Slot:
    """prod(shape) elements of `param` from `at` are [offset, offset + shape) of checkpoint tensor `key`.

    The first `stacked` axes of the checkpoint tensor count layers and experts: `shape` is 1 there.
    """

    param: str
    at: int
    key: str
    whole: tuple[int, ...]  # shape of the checkpoint tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    stacked: int
    may_be_padded: bool  # rows that pad the vocabulary: as many as the layout that saved it wanted

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def row(self) -> int:
        """Elements of one index of the first axis that can be cut."""
        return prod(self.shape[self.stacked + 1 :])

    def rows(self, first: int, count: int) -> Slot:
        """`count` rows of it from `first`."""
        axis = self.stacked
        offset = (*self.offset[:axis], self.offset[axis] + first, *self.offset[axis + 1 :])
        shape = (*self.shape[:axis], count, *self.shape[axis + 1 :])
        at = self.at + first * self.row
        return Slot(self.param, at, self.key, self.whole, offset, shape, axis, self.may_be_padded)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One `torch.save`d rectangle: where it lies in its tensor, and in which bytes of which file."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    at: int
    length: int


def slots_of(model: nn.Module) -> tuple[list[Slot], list[str]]:
    """Where Megatron keeps each parameter of `model` (a GPTModel, meta is enough), and the names of its other state."""
    slots: list[Slot] = []
    objects: list[str] = []
    parameters = dict(_state(model))
    for name, entry in model.sharded_state_dict().items():  # type: ignore[operator]
        if isinstance(entry, ShardedObject):
            objects.append(entry.unique_key)
            continue
        built = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
        for part in built.values() if isinstance(built, dict) else built:
            assert isinstance(part, ShardedTensor) and part.data is not None, f"{name}: {type(part).__name__}"
            assert part.data.is_contiguous(), f"{name} is not contiguous"
            at = int(part.data.storage_offset() - parameters[name].storage_offset())
            stacked = part.prepend_axis_num
            shape = (1,) * stacked + tuple(part.local_shape)
            whole, offset = tuple(part.global_shape), tuple(part.global_offset)
            slots.append(Slot(name, at, part.key, whole, offset, shape, stacked, bool(part.allow_shape_mismatch)))
    return slots, objects


def is_checkpoint(folder: Path) -> bool:
    return (folder / "metadata.json").is_file() and (folder / ".metadata").is_file()


def load_weights(chunks: Iterable[nn.Module], folder: Path) -> None:
    """Fill this rank's chunks of the pipeline from a checkpoint, whatever layout saved it. All ranks call it.

    Raises ValueError when the checkpoint is another model's.
    """
    for chunk in chunks:
        sharded = {
            name: entry
            for name, entry in chunk.sharded_state_dict().items()  # type: ignore[operator]
            if not isinstance(entry, ShardedObject)  # no weights: what Transformer Engine remembers of FP8 scales
        }
        try:
            loaded: Any = dist_checkpointing.load(sharded, str(folder))
        except Exception as error:  # Megatron and torch have a class of their own for each way to fail
            raise ValueError(f"{folder} cannot be loaded into this model ({error}); is it another model's?") from error
        for name, tensor in _state(chunk):
            if name in loaded:
                tensor.data.copy_(loaded[name])


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()  # a router's correction bias


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
    """One checkpoint's tensors, rectangle by rectangle. Not for several threads at once: open one for each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = FileSystemReader(folder).read_metadata()
        self._places: dict[MetadataIndex, _StorageInfo] = self._metadata.storage_data
        self._chunks: dict[tuple[str, tuple[int, ...]], list[ChunkStorageMetadata]] = defaultdict(list)
        self._stacked: dict[str, int] = {}
        self._loaded: OrderedDict[MetadataIndex, Tensor] = OrderedDict()
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
            self._stacked[key] = axis
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

    def read(self, slot: Slot, into: Tensor) -> None:
        """Fill `into` [slot.numel], which holds zeros, with the slot's rectangle. `check` must have been called."""
        target, found = into.view(slot.shape), 0
        for chunk in self._chunks[slot.key, slot.offset[: slot.stacked]]:
            start = tuple(map(max, slot.offset, chunk.offsets))
            ends = zip(slot.offset, slot.shape, chunk.offsets, chunk.sizes, strict=True)
            stop = tuple(min(a + n, b + m) for a, n, b, m in ends)
            if any(a >= b for a, b in zip(start, stop, strict=True)):
                continue
            here = tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, slot.offset, strict=True))
            there = tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, chunk.offsets, strict=True))
            part = self._load(MetadataIndex(slot.key, chunk.offsets)).view(tuple(chunk.sizes))[there]
            target[here].copy_(part)
            found += part.numel()
        if found != slot.numel and not slot.may_be_padded:
            raise ValueError(
                f"{self._folder / '.metadata'}: {slot.key} has {found} of {slot.numel} elements at {slot.offset}"
            )

    def _load(self, index: MetadataIndex) -> Tensor:
        if index in self._loaded:
            self._loaded.move_to_end(index)
            return self._loaded[index]
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
        while self._loaded and sum(x.nbytes for x in self._loaded.values()) + tensor.nbytes > CACHE_BYTES:
            self._loaded.popitem(last=False)
        self._loaded[index] = tensor
        return tensor


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
