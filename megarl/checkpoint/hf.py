"""The actor's weights as a Hugging Face folder: every rank writes files, nobody holds the model.

    tensors --dealt into files--> one file a rank at a time --Publisher (plan, checksums)--> safetensors + index

The files of a round are the "engine" of an ordinary weight sync, so an export is verified like one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.checkpoint.hf_folder import copy_model_files, file_names, split_by_size, write_index
from megarl.models.shards import ShardSlice
from megarl.types import CheckFailed
from megarl.weights.checksum import copy_and_verify, positional_checksum
from megarl.weights.plan import Boxes, Message
from megarl.weights.publish import Publisher
from megarl.weights.transports import Transport

__all__ = ["export_hf"]

FILE_BYTES = 4 << 30


def export_hf(
    folder: Path,
    *,
    origin: Path,  # where config and tokenizer are copied from
    shapes: Mapping[str, tuple[int, ...]],  # every tensor of the checkpoint
    sources: Boxes,  # [rank] -> where its parameters hold them
    parameters: Callable[[], Mapping[str, Tensor]],
    transport: Transport,
    dtype: torch.dtype,
    fp32: frozenset[str] = frozenset(),  # tensors that are fp32 whatever `dtype` is
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write `folder` whole or not at all; all ranks call it. An older folder of that name is replaced.

    Raises CheckFailed, on all ranks, when a tensor is missing or arrives changed.
    """
    staging = folder.with_name(f".{folder.name}.part")
    if transport.rank == 0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        copy_model_files(origin, staging)
    transport.gather(None)  # the folder is there
    sizes = {name: prod(shape) * (4 if name in fp32 else dtype.itemsize) for name, shape in shapes.items()}
    files = split_by_size(sizes, file_bytes, sizes.__getitem__)
    names = file_names(len(files))
    for first in range(0, len(files), transport.world):
        round_ = files[first : first + transport.world]
        expected = {name: shapes[name] for file in round_ for name in file}
        mine = round_[transport.rank] if transport.rank < len(round_) else ()
        tensors = {name: torch.empty(shapes[name], dtype=torch.float32 if name in fp32 else dtype) for name in mine}
        receiver = _File(tensors, dtype)
        Publisher.connect(
            sources=[[box for box in boxes if box.name in expected] for boxes in sources],
            expected=expected,
            parameters=parameters,
            receiver=receiver,
            ranks_per_replica=transport.world,
            transport=transport,
            dtype=dtype,
            fp32=fp32,
            is_staged=False,  # a file that is not whole is never given its name
        ).publish(version=0)
        if mine:
            save_file(receiver.tensors, staging / names[first + transport.rank], metadata={"format": "pt"})
    transport.gather(None)  # all files are written
    if transport.rank == 0:
        write_index(staging, dict(zip(names, files, strict=True)), sum(sizes.values()))
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    transport.gather(None)


@dataclass
class _File:
    """weights.publish.Receiver over whole tensors in host memory, seen as words of `dtype`."""

    tensors: dict[str, Tensor]
    dtype: torch.dtype
    _words: dict[str, Tensor] = field(init=False)
    boxes: list[ShardSlice] = field(init=False)
    _loaded: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._words = {name: x.view(self.dtype) for name, x in self.tensors.items()}
        self.boxes = [
            ShardSlice(name, (0,) * x.dim(), tuple(x.shape), name, 0, tuple(x.stride()))
            for name, x in self._words.items()
        ]

    def begin(self, *, places: bool) -> None:
        self._loaded = {}

    def places(self) -> Tensor:
        sums = [positional_checksum(tensor, (0,) * tensor.dim()) for tensor in self._words.values()]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)

    def write(self, message: Message, flat: Tensor) -> Tensor:
        wrong, at = torch.zeros((), dtype=torch.int64), 0
        for piece in message.pieces:
            view = piece.destination
            here = self._words[piece.name].as_strided(piece.shape, view.strides, view.offset)
            wrong += copy_and_verify(flat[at : at + piece.numel].view(piece.shape), here)
            self._loaded[piece.name] = self._loaded.get(piece.name, 0) + piece.numel
            at += piece.numel
        return wrong

    def seal(self) -> Mapping[str, int]:
        for name, tensor in self._words.items():
            if self._loaded.get(name, 0) != tensor.numel():
                raise CheckFailed(f"{name}: {self._loaded.get(name, 0)} of {tensor.numel()} elements arrived")
        return self._loaded

    def finish(self, version: int) -> None: ...

    def abort(self) -> None: ...
