"""A Hugging Face folder as source and as target of a conversion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megarl.checkpoint.conversion_map import ConversionMap, OutputFile, Piece, Source, is_contiguous
from megarl.checkpoint.hf_folder import HfFile, HfFolder, file_names, split_by_size, write_index
from megarl.models.shards import ShardSlice

__all__ = ["HfSource", "HfTarget"]

MIN_PIECE_BYTES, MAX_PIECE_BYTES = 2 << 20, 16 << 20  # a small model is converted in little memory


class HfSource:
    def __init__(self, conversion_map: ConversionMap, folder: HfFolder) -> None:
        self._map = conversion_map
        self._folder = folder
        total = sum(prod(shape) * folder.dtype(name).itemsize for name, shape in conversion_map.hf_shapes.items())
        self._piece_bytes = max(MIN_PIECE_BYTES, min(MAX_PIECE_BYTES, total // 1024))

    def dtype(self, param: str) -> torch.dtype:
        """Raises ValueError when tensors of different dtypes belong in one parameter."""
        first, *others = self._map.hf_slices[param]
        dtype = self._folder.dtype(first.name)
        for box in others:
            if self._folder.dtype(box.name) != dtype:
                raise ValueError(
                    f"{box.name} is {self._folder.dtype(box.name)} and {first.name} {dtype}, but Megatron keeps both "
                    f"in {param}; convert them to one dtype"
                )
        return dtype

    def stops(self, stored: ShardSlice) -> Iterable[int]:
        rows = next((size for size in stored.shape if size != 1), 1)
        row_bytes = stored.numel // rows * self.dtype(stored.param).itemsize
        step = max(1, self._piece_bytes // row_bytes)
        return range(step, rows, step)

    def read(self, piece: Piece) -> Tensor:
        parts = self._map.hf_parts(piece)
        if len(parts) == 1 and parts[0].numel == piece.numel and is_contiguous(parts[0]):
            return self._folder.read(parts[0]).view(-1)
        flat = torch.zeros(piece.numel, dtype=self.dtype(piece.param))
        for box in parts:
            flat.as_strided(box.shape, box.strides, box.offset).copy_(self._folder.read(box))
        return flat


class HfTarget:
    """Files of at most `file_bytes`; tensors that share a parameter are in one file."""

    def __init__(self, conversion_map: ConversionMap, source: Source, *, file_bytes: int) -> None:
        self._map = conversion_map
        self._dtypes = {
            box.name: source.dtype(param) for param, boxes in conversion_map.hf_slices.items() for box in boxes
        }
        sizes = {name: prod(shape) * self._dtypes[name].itemsize for name, shape in conversion_map.hf_shapes.items()}
        params: dict[str, list[str]] = {}  # first tensor of a group -> parameters that hold the group's tensors
        group_of: dict[str, str] = {}  # tensor -> first tensor of its group
        for param in conversion_map.stored.slices:
            names = list(dict.fromkeys(box.name for box in conversion_map.hf_slices[param]))
            first = next((group_of[name] for name in names if name in group_of), names[0])
            group_of |= dict.fromkeys(names, first)
            params.setdefault(first, []).append(param)
        group_bytes = dict.fromkeys(params, 0)
        for name, first in group_of.items():
            group_bytes[first] += sizes[name]
        groups = split_by_size(group_bytes.items(), file_bytes)
        self._tensors: dict[str, list[str]] = {}  # by file
        self.files = []
        for file, firsts in zip(file_names(len(groups)), groups, strict=True):
            members = set(firsts)
            self._tensors[file] = [name for name, first in group_of.items() if first in members]
            pieces = [piece for first in firsts for param in params[first]
                      for piece in conversion_map.pieces(param, source)]  # fmt: skip
            self.files.append(OutputFile(file, tuple(pieces), sum(group_bytes[first] for first in firsts)))

    def write(self, folder: Path, file: OutputFile, pieces: Iterator[tuple[Piece, Tensor]]) -> None:
        tensors = {name: (self._map.hf_shapes[name], self._dtypes[name]) for name in self._tensors[file.name]}
        with closing(HfFile(folder / file.name, tensors)) as out:
            for piece, flat in pieces:
                for box in self._map.hf_parts(piece):
                    out.write(box, flat.as_strided(box.shape, box.strides, box.offset))

    def finish(self, folder: Path, results: Iterable[None]) -> None:
        write_index(folder, self._tensors, sum(file.nbytes for file in self.files))

    def reopen(self, folder: Path) -> Source:
        written = HfFolder(folder)
        written.check(self._map.hf_shapes)
        return HfSource(self._map, written)
