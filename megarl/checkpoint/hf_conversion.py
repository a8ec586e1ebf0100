"""Hugging Face folders as source and target of a conversion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megarl.checkpoint.conversion_map import ConversionMap, OutputFile, Source
from megarl.checkpoint.hf_folder import HfFile, HfFolder, file_names, split_by_size, write_index

__all__ = ["HfTarget", "hf_source"]


def hf_source(conversion_map: ConversionMap, folder: HfFolder) -> Source:
    """Raises ValueError if tensors that Megatron stores in one have different dtypes."""
    firsts: dict[str, str] = {}
    for param, boxes in conversion_map.stored.slices.items():
        for name in (box.name for box in conversion_map.hf_slices[param]):
            first = firsts.setdefault(boxes[0].name, name)
            if folder.dtype(name) != folder.dtype(first):
                raise ValueError(
                    f"{name} is {folder.dtype(name)} and {first} {folder.dtype(first)}, but Megatron stores both in "
                    f"{boxes[0].name}; convert them to one dtype"
                )
    return Source(conversion_map, conversion_map.hf_slices, folder)


class HfTarget:
    """Files of at most `file_bytes`, unless a single tensor or parameter is larger."""

    def __init__(self, conversion_map: ConversionMap, source: Source, *, file_bytes: int) -> None:
        self._map = conversion_map
        self._dtypes: dict[str, torch.dtype] = {}
        params: dict[str, list[str]] = {}  # by first tensor: a layer's experts may be one tensor, which is in one file
        for param, boxes in conversion_map.hf_slices.items():
            params.setdefault(boxes[0].name, []).append(param)
            self._dtypes |= dict.fromkeys([box.name for box in boxes], source.dtype(param))
        groups = split_by_size(params.values(), file_bytes, lambda group: self._nbytes(self._names(group)))
        self.files, self._tensors = [], {}
        for name, group in zip(file_names(len(groups)), groups, strict=True):
            members = [param for part in group for param in part]
            self._tensors[name] = self._names(members)
            self.files.append(OutputFile(name, tuple(members), self._nbytes(self._tensors[name])))

    def _names(self, params: list[str]) -> list[str]:
        return list(dict.fromkeys(box.name for param in params for box in self._map.hf_slices[param]))

    def _nbytes(self, names: list[str]) -> int:
        return sum(prod(self._map.hf_shapes[name]) * self._dtypes[name].itemsize for name in names)

    def write(self, folder: Path, file: OutputFile, params: Iterator[tuple[str, Tensor]]) -> None:
        tensors = {name: (self._map.hf_shapes[name], self._dtypes[name]) for name in self._tensors[file.name]}
        with closing(HfFile(folder / file.name, tensors)) as out:
            for param, flat in params:
                for box in self._map.hf_slices[param]:
                    out.write(box, flat)

    def finish(self, folder: Path, results: list[None]) -> None:
        write_index(folder, self._tensors, sum(file.nbytes for file in self.files))

    def reopen(self, folder: Path) -> Source:
        written = HfFolder(folder)
        written.check(self._map.hf_shapes)
        return hf_source(self._map, written)
