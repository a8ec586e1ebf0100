"""A Hugging Face folder's safetensors -> this rank's parameters, slice by slice; no tensor is ever read whole.

boxes (which slice of which HF tensor lies where) --get_slice--> copy_ into parameter.as_strided
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megarl.models.shards import ShardSlice

__all__ = ["load_hf"]

_PADDED = ("word_embeddings.weight", "output_layer.weight")  # the only parameters with rows that no HF tensor has


@torch.no_grad()
def load_hf(parameters: Mapping[str, Tensor], boxes: Iterable[ShardSlice], folder: str | Path) -> None:
    """Fill `parameters` (local Megatron names) from `folder`; padding rows of the vocabulary become zero.

    Raises ValueError when the folder lacks a tensor, or has one of another shape.
    """
    by_param: dict[str, list[ShardSlice]] = defaultdict(list)
    for box in boxes:
        by_param[box.param].append(box)
    assert by_param.keys() == parameters.keys(), f"boxes and model differ: {by_param.keys() ^ parameters.keys()}"
    with ExitStack() as stack:
        tensors = _Folder(Path(folder), stack)
        for name, parameter in parameters.items():
            _assert_covered(name, parameter, by_param[name])
            if name.endswith(_PADDED):
                parameter.zero_()
            for box in by_param[name]:
                _view(parameter, box).copy_(tensors.read(box))


def _view(parameter: Tensor, box: ShardSlice) -> Tensor:
    return parameter.as_strided(box.shape, box.strides, parameter.storage_offset() + box.offset)


def _assert_covered(name: str, parameter: Tensor, boxes: list[ShardSlice]) -> None:
    """Every element of a parameter comes from one HF element, padding rows from none."""
    assert parameter.is_contiguous(), f"{name} is not contiguous"
    count = torch.zeros(parameter.shape, dtype=torch.int8, device="cpu")
    for box in boxes:
        view = count.as_strided(box.shape, box.strides, box.offset)
        view += 1
    assert count.numel() == 0 or count.max() <= 1, f"{name}: an element comes from two boxes"
    if not name.endswith(_PADDED):
        assert count.numel() == 0 or count.min() == 1, f"{name}: an element comes from no box"


class _Folder:
    """The tensors of a checkpoint by name, whichever file they lie in; files are opened once, when first needed."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        index = folder / "model.safetensors.index.json"
        self._folder, self._stack, self._open = folder, stack, {}
        self._files: dict[str, str] | None = json.loads(index.read_text())["weight_map"] if index.is_file() else None

    def read(self, box: ShardSlice) -> Tensor:
        whole = self._file(box.name).get_slice(box.name)
        stop = tuple(start + size for start, size in zip(box.start, box.shape, strict=True))
        if len(stop) == len(whole.get_shape()) + 1:  # its last dim seen as pairs
            start, stop = ((*at[:-2], 2 * at[-2]) for at in (box.start, stop))
            return self._slice(box.name, whole, start, stop).unflatten(-1, (-1, 2))
        return self._slice(box.name, whole, box.start, stop)

    def _slice(self, name: str, whole: Any, start: tuple[int, ...], stop: tuple[int, ...]) -> Tensor:
        if len(whole.get_shape()) != len(stop) or any(a > b for a, b in zip(stop, whole.get_shape(), strict=True)):
            raise ValueError(
                f"{self._folder}: {name} has shape {whole.get_shape()}, its config.json asks for at least {stop}"
            )
        if whole.get_dtype() not in ("F64", "F32", "F16", "BF16"):  # without its scales it would be another number
            raise ValueError(f"{self._folder}: {name} is {whole.get_dtype()}, quantised; name a copy of it in bf16")
        return whole[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]

    def _file(self, tensor: str) -> Any:
        file = "model.safetensors" if self._files is None else self._files.get(tensor)
        if file is None or not (self._folder / file).is_file():
            raise ValueError(f"{self._folder} has no tensor {tensor}; give a folder with all its *.safetensors files")
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt", device="cpu"))
        if self._files is None and tensor not in self._open[file].keys():  # noqa: SIM118  # not a mapping
            raise ValueError(f"{self._folder}/{file} has no tensor {tensor}; is its config.json another model's?")
        return self._open[file]
