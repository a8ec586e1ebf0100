"""Maps the tensors of a Hugging Face folder and a Megatron checkpoint to one rank's parameters.

    HF tensors --ShardSlice--> parameters <--ShardSlice-- tensors of the checkpoint

A conversion moves parameters, one by one, from a TensorSource to a Target. Either format can be the
source or the target.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.models.shape import Shape
from megarl.models.shards import ShardSlice, SlicesByName
from megarl.weights.sync.execute import slice_checksum

if TYPE_CHECKING:
    from megarl.checkpoint.hf_folder import HfFolder
    from megarl.checkpoint.torch_dist import MegatronFolder


@dataclass(frozen=True)
class OutputFile:
    name: str
    params: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class StoredTensors:
    """Where the tensors of a Megatron distributed checkpoint lie in a single rank's parameters."""

    # parameter -> its slices, in order; their `name` is the checkpoint's key
    slices: SlicesByName
    shapes: Mapping[str, Shape]  # key -> shape
    # keys whose row count depends on the layout they were saved in: the vocabulary's
    padded: frozenset[str]
    objects: Sequence[str]  # keys of Megatron's other state


@dataclass(frozen=True)
class ConversionMap:
    hf_shapes: Mapping[str, Shape]
    hf_slices: SlicesByName  # by parameter
    stored: StoredTensors

    @classmethod
    def build(
        cls,
        hf_shapes: Mapping[str, Shape],
        slices: Iterable[ShardSlice],
        stored: StoredTensors,
    ) -> "ConversionMap":
        """Combines a single rank's slices of HF tensors with its slices of Megatron's tensors.

        Asserts that both cover every element.
        """
        by_param = defaultdict(list)
        elements = Counter()
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
        made = cls(hf_shapes, by_param, stored)
        for param, boxes in stored.slices.items():
            filled = sum(box.numel for box in by_param[param])
            size = made.numel(param)
            assert filled == size or (filled < size and boxes[0].name in stored.padded), (
                f"{param}: {filled} of {size} elements filled"
            )
        return made

    def numel(self, param: str) -> int:
        return sum(box.numel for box in self.stored.slices[param])

    def checksums(self, param: str, flat: Tensor) -> Counter[str]:
        """Returns the checksum of the parameter's part of each HF tensor.

        The checksums of all parameters add up to those of the HF tensors.
        """
        sums = Counter()
        for box in self.hf_slices[param]:
            checksum = slice_checksum(box, {param: flat}, self.hf_shapes[box.name], flat.dtype)
            sums[box.name] += int(checksum)
        return sums


@dataclass(frozen=True)
class TensorSource:
    """Reads parameters from a folder; `slices` maps its tensors to parameters. Thread-safe."""

    conversion_map: ConversionMap
    slices: SlicesByName  # by parameter
    folder: "HfFolder | MegatronFolder"

    def dtype(self, param: str) -> torch.dtype:
        return self.folder.dtype(self.slices[param][0].name)

    def read(self, param: str) -> Tensor:
        """Returns the flat parameter, [numel], with zeros in rows that pad the vocabulary.

        Raises ValueError, naming the tensor, if it cannot be read.
        """
        flat = torch.zeros(self.conversion_map.numel(param), dtype=self.dtype(param))
        for box in self.slices[param]:
            self.folder.copy(box, flat)
        return flat
