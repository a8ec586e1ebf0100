"""Maps a model's Hugging Face tensors and its Megatron checkpoint's tensors to the parameters of a single rank.

    HF tensors --ShardSlice--> parameters <--ShardSlice-- tensors of the checkpoint

A conversion moves parameters, one by one, from a Source to a Target. Either format can be the source or the target.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.models.shards import ShardSlice
from megarl.weights.placement_check import slice_checksum


@dataclass(frozen=True, slots=True)
class OutputFile:
    name: str
    params: tuple[str, ...]
    nbytes: int


class TensorFolder(Protocol):
    """HfFolder or MegatronFolder."""

    def dtype(self, name: str) -> torch.dtype: ...
    def copy(self, box: ShardSlice, parameter: Tensor) -> None: ...


class Target(Protocol):
    files: list[OutputFile]

    def write(self, folder: Path, file: OutputFile, params: Iterator[tuple[str, Tensor]]) -> Any:
        """Write a file from its parameters, in order, and flush it. Returns a picklable result for `finish`."""
        ...

    def rounded(self, param: str, flat: Tensor) -> Tensor:
        """Returns the parameter as it will be read back, if it is written as `flat`."""
        ...

    def finish(self, folder: Path, results: list[Any]) -> None:
        """Write the metadata of all files."""
        ...

    def reopen(self, folder: Path) -> Source:
        """Open the finished folder. Raises ValueError if it is incomplete."""
        ...


@dataclass(frozen=True)
class StoredTensors:
    """Where the tensors of a Megatron distributed checkpoint lie in the parameters of a single rank."""

    slices: Mapping[str, Sequence[ShardSlice]]  # by parameter, in order; `name` is the checkpoint's key
    shapes: Mapping[str, tuple[int, ...]]  # by key
    padded: frozenset[str]  # keys whose row count depends on the layout they were saved in: the vocabulary's
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
        """Combine the slices of the tables with Megatron's, for a single rank; both must cover every element."""
        by_param: dict[str, list[ShardSlice]] = defaultdict(list)
        elements: Counter[str] = Counter()
        for box in slices:
            by_param[box.param].append(box)
            elements[box.name] += box.numel
        assert by_param.keys() == stored.slices.keys(), f"{sorted(by_param.keys() ^ stored.slices.keys())[:4]}"
        for name, shape in hf_shapes.items():
            assert elements[name] == prod(shape), f"{name}: {elements[name]} of {prod(shape)} elements have a parameter"
        for param, stored_slices in stored.slices.items():
            filled, size = (sum(box.numel for box in boxes) for boxes in (by_param[param], stored_slices))
            is_padded = stored_slices[0].name in stored.padded
            assert filled == size or (filled < size and is_padded), f"{param}: {filled} of {size} elements filled"
        return cls(hf_shapes, by_param, stored)

    def numel(self, param: str) -> int:
        return sum(box.numel for box in self.stored.slices[param])

    def checksums(self, param: str, flat: Tensor) -> Counter[str]:
        """The checksum of the parameter's part of each HF tensor; over all parameters they sum to the tensor's."""
        sums: Counter[str] = Counter()
        for box in self.hf_slices[param]:
            sums[box.name] += int(slice_checksum(box, {param: flat}, self.hf_shapes[box.name], flat.dtype))
        return sums


@dataclass(frozen=True, slots=True)
class Source:
    """Reads parameters from a folder whose tensors `slices` maps to them. Thread-safe."""

    conversion_map: ConversionMap
    slices: Mapping[str, Sequence[ShardSlice]]  # by parameter
    folder: TensorFolder

    def dtype(self, param: str) -> torch.dtype:
        return self.folder.dtype(self.slices[param][0].name)

    def read(self, param: str) -> Tensor:
        """Returns [numel], with zeros in rows that pad the vocabulary. Raises ValueError naming the tensor."""
        flat = torch.zeros(self.conversion_map.numel(param), dtype=self.dtype(param))
        for box in self.slices[param]:
            self.folder.copy(box, flat)
        return flat
