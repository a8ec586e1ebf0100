"""The two sides of a conversion: what can be read by groups, and what is written file by file.

    HfSource | MegatronSource --read(group)--> elements --write--> HfTarget | MegatronTarget

A source needs no other memory than the group it reads (and the chunk of a checkpoint that holds it). A target knows
from shapes alone which files it will write, and in which order; `reopen` gives back what was written as a source.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from megarl.checkpoint.conversion_map import ConversionMap, Group, Span
from megarl.checkpoint.hf_folder import INDEX, HfFile, HfFolder, bytes_of
from megarl.checkpoint.torch_dist import Chunk, Reader, finish, write_chunk

__all__ = ["File", "HfSource", "HfTarget", "MegatronSource", "MegatronTarget", "Source", "Target"]


class Source(Protocol):
    """Parameters of one model, by ranges. Several threads may read at once."""

    def dtype(self, name: str) -> torch.dtype:
        """Of an HF tensor."""
        ...

    def read(self, group: Group) -> Tensor:
        """[group.numel], not to be written to; padding rows of the vocabulary are zero."""
        ...


@dataclass(frozen=True)
class HfSource:
    places: ConversionMap
    folder: HfFolder

    def dtype(self, name: str) -> torch.dtype:
        return self.folder.dtype(name)

    def read(self, group: Group) -> Tensor:
        parts = list(self.places.parts(group))
        dtype = self.dtype(self.places.spans[group.param][0].name)
        flat = torch.empty(group.numel, dtype=dtype)
        if sum(part.numel for part in parts) < group.numel:
            flat.zero_()
        for part in parts:
            into = part.view(flat, group.at)
            if part.is_flat:
                self.folder.read(part.name, part.at, into.reshape(-1))
            else:
                whole = torch.empty(part.shape, dtype=flat.dtype)
                self.folder.read(part.name, part.at, whole.view(-1))
                into.copy_(whole)
        return flat


@dataclass(frozen=True)
class MegatronSource:
    places: ConversionMap
    reader: Reader

    def dtype(self, name: str) -> torch.dtype:
        param = self.places.spans_of_tensor[name][0].param
        return self.reader.tensors[self.places.slots[param][0].key][1]

    def read(self, group: Group) -> Tensor:
        parts = [self.reader.read(slot) for slot in group.slots]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class File:
    name: str
    units: tuple[Any, ...]
    nbytes: int


class Target(Protocol):
    """Files to be written, in units that are read, written and remembered one after another."""

    files: tuple[File, ...]

    def fetch(self, source: Source, unit: Any) -> tuple[Tensor, list[tuple[str, int]]]:
        """A unit's elements, and the checksums of the HF elements among them."""
        ...

    def begin(self, stream: BinaryIO, file: File) -> None: ...
    def write(self, stream: BinaryIO, file: File, unit: Any, flat: Tensor) -> list[Any]:
        """What `finish` must know of it, as JSON."""
        ...

    def tensor(self, unit: Any) -> str:
        """What errors call it."""
        ...

    def prove(self, source: Source, unit: Any) -> Iterator[tuple[str, int, int]]:
        """(HF tensor, checksum, bytes) of a unit, read back from what was written."""
        ...

    def finish(self, folder: Path, written: list[Any]) -> None: ...
    def reopen(self, folder: Path) -> Source: ...


class MegatronTarget:
    """Chunks of at most `group_bytes`; `file_of` puts parameters that a rank loads together into files of their own."""

    def __init__(
        self,
        places: ConversionMap,
        objects: Iterable[str],
        dtypes: Mapping[str, torch.dtype],  # by HF tensor
        *,
        cuts: int,
        file_of: Callable[[str], str],
        file_bytes: int,
        group_bytes: int,
    ) -> None:
        self._places = places
        self._objects = list(objects)
        self._wholes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        by_file: dict[str, list[list[Group]]] = {}
        sizes: dict[str, int] = defaultdict(int)
        for param, slots in places.slots.items():
            dtype = dtypes[places.spans[param][0].name]
            for name in [span.name for span in places.spans[param]]:
                self._agree(name, dtypes[name], slots[0].key, slots[0].whole)
            for slot in slots:
                self._agree(places.spans[param][0].name, dtype, slot.key, slot.whole)
            held = by_file.setdefault(file_of(param), [[]])
            for group in places.groups(param, limit=group_bytes // dtype.itemsize, cuts=cuts):
                if held[-1] and sizes[file_of(param)] + group.numel * dtype.itemsize > file_bytes:
                    held.append([])
                    sizes[file_of(param)] = 0
                held[-1].append(group)
                sizes[file_of(param)] += group.numel * dtype.itemsize
        self.files = tuple(
            File(f"{label}_{part}.distcp", tuple(groups), sum(self._nbytes(group) for group in groups))
            for label, parts in by_file.items()
            for part, groups in enumerate(parts)
        )

    def _agree(self, name: str, dtype: torch.dtype, key: str, whole: tuple[int, ...]) -> None:
        first = self._wholes.setdefault(key, (whole, dtype))[1]
        if first != dtype:
            raise ValueError(
                f"{name} is {dtype}, but Megatron keeps it in {key} with tensors of {first}; convert them to one dtype"
            )

    def _nbytes(self, group: Group) -> int:
        return group.numel * self._wholes[group.slots[0].key][1].itemsize

    def tensor(self, unit: Group) -> str:
        return next(self._places.parts(unit)).name

    def fetch(self, source: Source, unit: Group) -> tuple[Tensor, list[tuple[str, int]]]:
        flat = source.read(unit)
        return flat, list(self._places.digests(unit, flat))

    def prove(self, source: Source, unit: Group) -> Iterator[tuple[str, int, int]]:
        flat, sums = self.fetch(source, unit)
        for number, (name, value) in enumerate(sums):
            yield name, value, 0 if number else flat.nbytes

    def begin(self, stream: BinaryIO, file: File) -> None: ...

    def write(self, stream: BinaryIO, file: File, unit: Group, flat: Tensor) -> list[Any]:
        written = []
        for slot in unit.slots:
            part = flat[slot.at - unit.at :][: slot.numel]
            if part.untyped_storage().nbytes() > part.nbytes:  # all of which would be saved
                part = part.clone()
            chunk = write_chunk(stream, slot, part, file.name)
            written.append([chunk.key, chunk.offset, chunk.shape, chunk.file, chunk.at, chunk.length])
        return written

    def finish(self, folder: Path, written: list[Any]) -> None:
        chunks = [Chunk(key, tuple(offset), tuple(shape), *where) for key, offset, shape, *where in written]
        finish(folder, chunks, self._wholes, self._objects)

    def reopen(self, folder: Path) -> Source:
        reader = Reader(folder)
        reader.check(slot for slots in self._places.slots.values() for slot in slots)
        return MegatronSource(self._places, reader)


@dataclass(frozen=True, slots=True)
class _Run:
    """`numel` elements of HF tensor `name` from `at`, and the groups that hold them."""

    name: str
    at: int
    numel: int
    groups: tuple[Group, ...]


def _narrow(group: Group, part: Span) -> Group:
    """Only the part's own rows of the group."""
    (slot,) = [slot for slot in group.slots if slot.at <= part.offset < slot.at + slot.numel]
    first, rest = divmod(part.offset - slot.at, slot.row)
    rows, more = divmod(part.numel, slot.row)
    assert not rest and not more, f"{part.name} begins or ends within a row of {slot.key}"
    piece = slot.rows(first, rows)
    return Group(group.param, piece.at, piece.numel, (piece,))


class HfTarget:
    """Safetensors files of at most `file_bytes`, tensors in order, an index where there are several."""

    def __init__(
        self, places: ConversionMap, dtypes: Mapping[str, torch.dtype], *, file_bytes: int, group_bytes: int
    ) -> None:
        self._places, self._group_bytes = places, group_bytes
        sizes = {name: prod(shape) * dtypes[name].itemsize for name, shape in places.shapes.items()}
        dealt: list[list[str]] = [[]]
        for name, size in sizes.items():
            if dealt[-1] and sum(sizes[held] for held in dealt[-1]) + size > file_bytes:
                dealt.append([])
            dealt[-1].append(name)
        self._files: dict[str, HfFile] = {}
        for number, names in enumerate(dealt, 1):
            label = f"model-{number:05d}-of-{len(dealt):05d}" if len(dealt) > 1 else "model"
            tensors = {name: (places.shapes[name], dtypes[name]) for name in names}
            self._files[f"{label}.safetensors"] = HfFile(f"{label}.safetensors", tensors)
        self._total = sum(sizes.values())
        self.files = tuple(
            File(
                label,
                tuple(run for name in names for run in self._runs(name, dtypes[name])),
                sum(sizes[name] for name in names),
            )
            for (label, _), names in zip(self._files.items(), dealt, strict=True)
        )

    def _runs(self, name: str, dtype: torch.dtype) -> Iterator[_Run]:
        """A tensor in order, as many groups at once as fit."""
        limit, held = self._group_bytes // dtype.itemsize, []
        for param in dict.fromkeys(span.param for span in self._places.spans_of_tensor[name]):
            for group in self._places.groups(param, limit=limit):
                for part in self._places.parts(group):
                    if part.name == name:
                        held.append((part.at, part.numel, _narrow(group, part) if part.is_flat else group))
        held.sort(key=lambda piece: piece[0])
        while held:
            count = 1
            while count < len(held) and sum(numel for _, numel, _ in held[: count + 1]) <= limit:
                count += 1
            taken, held = held[:count], held[count:]
            yield _Run(name, taken[0][0], sum(numel for _, numel, _ in taken), tuple(group for _, _, group in taken))

    def tensor(self, unit: _Run) -> str:
        return unit.name

    def fetch(self, source: Source, unit: _Run) -> tuple[Tensor, list[tuple[str, int]]]:
        pieces = []  # in order
        for group in unit.groups:
            read = source.read(group)
            held = [part for part in self._places.parts(group) if part.name == unit.name]
            pieces += [part.view(read, group.at).reshape(-1) for part in sorted(held, key=lambda part: part.at)]
        flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        assert flat.numel() == unit.numel, f"{unit.name}: {flat.numel()} of {unit.numel} elements"
        return flat, [(unit.name, self._places.digest(unit.name, unit.at, flat))]

    def prove(self, source: Source, unit: _Run) -> Iterator[tuple[str, int, int]]:
        for group in unit.groups:
            flat = source.read(group)
            for name, value in self._places.digests(group, flat):
                if name == unit.name:
                    yield name, value, flat.nbytes

    def begin(self, stream: BinaryIO, file: File) -> None:
        stream.write(self._files[file.name].header)

    def write(self, stream: BinaryIO, file: File, unit: _Run, flat: Tensor) -> list[Any]:
        stream.write(bytes_of(flat))
        return []

    def finish(self, folder: Path, written: list[Any]) -> None:
        if len(self._files) > 1:
            where = {name: file.name for file in self._files.values() for name in file.tensors}
            index = {"metadata": {"total_size": self._total}, "weight_map": where}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def reopen(self, folder: Path) -> Source:
        opened = HfFolder.open(folder)
        opened.check(self._places.shapes)
        return HfSource(self._places, opened)
