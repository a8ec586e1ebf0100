"""How a model's Hugging Face tensors and its Megatron checkpoint's tensors lie in the parameters of a single rank.

    HF tensors --ShardSlice--> parameters <--ShardSlice-- tensors of the checkpoint

A conversion moves pieces, ranges of one parameter's elements, from a Source to a Target. Either may be either format.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.checkpoint.hf_folder import take_rows
from megarl.models.shards import ShardSlice
from megarl.weights.checksum import positional_checksum

__all__ = ["ConversionMap", "OutputFile", "Piece", "Source", "StoredTensors", "Target", "is_contiguous"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [first, first + numel) of parameter `param`: what is in memory at once."""

    param: str
    first: int
    numel: int


@dataclass(frozen=True, slots=True)
class OutputFile:
    name: str
    pieces: tuple[Piece, ...]
    nbytes: int


class Source(Protocol):
    """Parameters, read piece by piece. Several threads may read at once."""

    def dtype(self, param: str) -> torch.dtype: ...

    def stops(self, stored: ShardSlice) -> Iterable[int]:
        """Rows at which the slice of a checkpoint tensor may be divided into pieces."""
        ...

    def read(self, piece: Piece) -> Tensor:
        """[piece.numel]; rows that pad the vocabulary are zero. Raises ValueError naming what cannot be read."""
        ...


class Target(Protocol):
    """Files, each written by one call."""

    files: Sequence[OutputFile]

    def write(self, folder: Path, file: OutputFile, pieces: Iterator[tuple[Piece, Tensor]]) -> Any:
        """Write and flush the file, from its pieces in order. Returns what `finish` needs, picklable."""
        ...

    def finish(self, folder: Path, results: Iterable[Any]) -> None:
        """Write what describes the files."""
        ...

    def reopen(self, folder: Path) -> Source:
        """The finished folder. Raises ValueError when it is incomplete."""
        ...


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a Megatron distributed checkpoint, as the parameters of a single rank hold them."""

    slices: Mapping[str, Sequence[ShardSlice]]  # by parameter, in order; `name` is the checkpoint's key
    shapes: Mapping[str, tuple[int, ...]]  # by key
    padded: frozenset[str]  # keys whose number of rows depends on the layout that saved them: the vocabulary's
    objects: Sequence[str]  # keys of Megatron's other state


@dataclass(frozen=True)
class ConversionMap:
    hf_shapes: Mapping[str, tuple[int, ...]]
    hf_slices: Mapping[str, Sequence[ShardSlice]]  # by parameter
    stored: StoredTensors

    @classmethod
    def build(
        cls, hf_shapes: Mapping[str, tuple[int, ...]], slices: Iterable[ShardSlice], stored: StoredTensors
    ) -> ConversionMap:
        """From the tables' slices of a single rank and Megatron's own; every element must be in both."""
        by_param: dict[str, list[ShardSlice]] = defaultdict(list)
        elements: Counter[str] = Counter()
        for box in slices:
            by_param[box.param].append(box)
            elements[box.name] += box.numel
        assert by_param.keys() == stored.slices.keys(), f"{sorted(by_param.keys() ^ stored.slices.keys())[:4]}"
        for name, shape in hf_shapes.items():
            assert elements[name] == prod(shape), (
                f"{name}: {elements[name]} of {prod(shape)} elements lie in parameters"
            )
        for param, parts in stored.slices.items():
            filled, size = (sum(box.numel for box in boxes) for boxes in (by_param[param], parts))
            is_padded = parts[0].name in stored.padded
            assert filled == size or (filled < size and is_padded), f"{param}: {filled} of {size} elements"
        return cls(hf_shapes, by_param, stored)

    def pieces(self, param: str, source: Source, *, parts: int = 1) -> Iterator[Piece]:
        """The parameter, divided where the source allows, and into `parts` equal ones.

        A parameter that HF tensors are transposed or interleaved in is one piece.
        """
        stored = self.stored.slices[param]
        if not all(is_contiguous(box) for box in self.hf_slices[param]):
            yield Piece(param, 0, sum(box.numel for box in stored))
            return
        for box in stored:
            rows = next((size for size in box.shape if size != 1), 1)
            part, row = -(-rows // parts), box.numel // rows
            stops = sorted({0, rows, *range(part, rows, part), *source.stops(box)})
            for begin, end in pairwise(stops):
                yield Piece(param, box.offset + begin * row, (end - begin) * row)

    def hf_parts(self, piece: Piece) -> list[ShardSlice]:
        """What of HF tensors lies in the piece; offsets count from its first element."""
        return _clip(self.hf_slices[piece.param], piece)

    def stored_parts(self, piece: Piece) -> list[ShardSlice]:
        """What of checkpoint tensors lies in the piece."""
        return _clip(self.stored.slices[piece.param], piece)

    def checksums(self, piece: Piece, flat: Tensor) -> Counter[str]:
        """HF tensor -> checksum of its elements in the piece; those of all pieces add up (mod 2^64) to the tensor's."""
        sums: Counter[str] = Counter()
        for box in self.hf_parts(piece):
            part, start = flat.as_strided(box.shape, box.strides, box.offset), box.start
            if len(start) > len(self.hf_shapes[box.name]):  # pairs in the last dim
                part, start = part.flatten(-2), (*start[:-2], 2 * start[-2])
            sums[box.name] += int(positional_checksum(part, start))
        return sums


def is_contiguous(box: ShardSlice) -> bool:
    """Whether its elements follow each other in the parameter, too."""
    return all(
        size == 1 or stride == prod(box.shape[axis + 1 :])
        for axis, (size, stride) in enumerate(zip(box.shape, box.strides, strict=True))
    )


def _clip(boxes: Iterable[ShardSlice], piece: Piece) -> list[ShardSlice]:
    parts = []
    for box in boxes:
        rows, row = next(((n, s) for n, s in zip(box.shape, box.strides, strict=True) if n != 1), (1, 1))
        begin = max(0, -(-(piece.first - box.offset) // row))
        end = min(rows, -(-(piece.first + piece.numel - box.offset) // row))
        if begin < end:
            part = take_rows(box, begin, end) if end - begin < rows else box
            assert part.offset >= piece.first, f"{piece} divides a row of {box.name}"
            parts.append(replace(part, offset=part.offset - piece.first))
    return parts
