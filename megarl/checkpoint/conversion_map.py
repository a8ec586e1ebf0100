"""Maps a model's Hugging Face tensors and its Megatron checkpoint's tensors to the parameters of a single rank.

    HF tensors --ShardSlice--> parameters <--ShardSlice-- tensors of the checkpoint

A conversion moves parameters, one by one, from a Source to a Target. Either format can be the source or the target.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.models.shards import ShardSlice
from megarl.weights.placement_check import slice_checksum

if TYPE_CHECKING:
    from megarl.checkpoint.hf_folder import HfFolder
    from megarl.checkpoint.torch_dist import MegatronFolder


@dataclass(frozen=True, slots=True)
class OutputFile:
    name: str
    params: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class StoredTensors:
    """Where the tensors of a Megatron distributed checkpoint lie in the parameters of a single rank."""

    slices: Mapping[
        str, Sequence[ShardSlice]
    ]  # by parameter, in order; `name` is the checkpoint's key
    shapes: Mapping[str, tuple[int, ...]]  # by key
    padded: frozenset[
        str
    ]  # keys whose row count depends on the layout they were saved in: the vocabulary's
    objects: Sequence[str]  # keys of Megatron's other state


@dataclass(frozen=True)
class ConversionMap:
    hf_shapes: Mapping[str, tuple[int, ...]]
    hf_slices: Mapping[str, Sequence[ShardSlice]]  # by parameter
    stored: StoredTensors

    @classmethod
    def build(
        cls,
        hf_shapes: Mapping[str, tuple[int, ...]],
        slices: Iterable[ShardSlice],
        stored: StoredTensors,
    ) -> ConversionMap:
        """Combine the slices of the tables with Megatron's, for a single rank; both must cover every element."""
        by_param: dict[str, list[ShardSlice]] = defaultdict(list)
        elements: Counter[str] = Counter()
        for box in slices:
            by_param[box.param].append(box)
            elements[box.name] += box.numel
        assert by_param.keys() == stored.slices.keys(), (
            f"{sorted(by_param.keys() ^ stored.slices.keys())[:4]}"
        )
        for name, shape in hf_shapes.items():
            assert elements[name] == prod(shape), (
                f"{name}: {elements[name]} of {prod(shape)} elements have a parameter"
            )
        for param, stored_slices in stored.slices.items():
            filled, size = (
                sum(box.numel for box in boxes) for boxes in (by_param[param], stored_slices)
            )
            is_padded = stored_slices[0].name in stored.padded
            assert filled == size or (filled < size and is_padded), (
                f"{param}: {filled} of {size} elements filled"
            )
        return cls(hf_shapes, by_param, stored)

    def numel(self, param: str) -> int:
        return sum(box.numel for box in self.stored.slices[param])

    def checksums(self, param: str, flat: Tensor) -> Counter[str]:
        """The checksum of the parameter's part of each HF tensor; over all parameters they sum to the tensor's."""
        sums: Counter[str] = Counter()
        for box in self.hf_slices[param]:
            sums[box.name] += int(
                slice_checksum(box, {param: flat}, self.hf_shapes[box.name], flat.dtype)
            )
        return sums


@dataclass(frozen=True, slots=True)
class Source:
    """Reads parameters from a folder whose tensors `slices` maps to them. Thread-safe."""

    conversion_map: ConversionMap
    slices: Mapping[str, Sequence[ShardSlice]]  # by parameter
    folder: HfFolder | MegatronFolder

    def dtype(self, param: str) -> torch.dtype:
        return self.folder.dtype(self.slices[param][0].name)

    def read(self, param: str) -> Tensor:
        """Returns [numel], with zeros in rows that pad the vocabulary. Raises ValueError naming the tensor."""
        flat = torch.zeros(self.conversion_map.numel(param), dtype=self.dtype(param))
        for box in self.slices[param]:
            self.folder.copy(box, flat)
        return flat
