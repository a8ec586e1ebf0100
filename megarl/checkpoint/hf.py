"""The actor's weights as a Hugging Face folder: every rank writes files, nobody holds the model.

    tensors --dealt into files--> one file a rank at a time --Publisher (plan, checksums)--> safetensors + index

The files of a round are the "engine" of an ordinary weight sync, so an export is verified like one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.models.shards import ShardSlice
from megarl.weights.memory_receiver import MemoryReceiver
from megarl.weights.plan import SlicesByRank
from megarl.weights.publish import Publisher, WeightFormat, WeightSender, plan_slices
from megarl.weights.transports import Transport

__all__ = ["export_hf"]

FILE_BYTES = 4 << 30
ROUND_BYTES = 256 << 20  # that a rank receives at a time
COPIED = ("*.json", "*.jinja", "*.model", "*.txt")  # config and tokenizer, as they came


def export_hf(
    folder: Path,
    *,
    origin: Path,  # where config and tokenizer are copied from
    shapes: Mapping[str, tuple[int, ...]],  # every tensor of the checkpoint
    sources: SlicesByRank,  # [rank] -> where its parameters hold them
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
        for pattern in COPIED:
            for file in origin.glob(pattern):
                if not file.name.endswith(".index.json") and file.name != "metadata.json":  # a Megatron folder's own
                    shutil.copy(file, staging / file.name)
    transport.gather(None)  # the folder is there
    files = _deal(shapes, file_bytes // dtype.itemsize)
    names = [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    if len(files) == 1:
        names = ["model.safetensors"]
    for first in range(0, len(files), transport.world):
        round_ = files[first : first + transport.world]
        weights = WeightFormat({name: shapes[name] for file in round_ for name in file}, dtype, fp32)
        local = [[part for part in slices if part.name in weights.shapes] for slices in sources]
        whole = [weights.moved_slices([_whole(name, shapes[name]) for name in file]) for file in round_]
        whole += [[]] * (transport.world - len(round_))
        mine = round_[transport.rank] if transport.rank < len(round_) else ()
        tensors = {name: torch.empty(shapes[name], dtype=weights.dtype_of(name)) for name in mine}
        Publisher.connect(
            plan_slices(weights, local, whole, ranks_per_replica=len(round_), round_bytes=ROUND_BYTES),
            WeightSender(local[transport.rank], parameters),
            MemoryReceiver(whole[transport.rank], tensors, dtype) if mine else None,
            transport,
            weights,
            ranks_per_replica=len(round_),
            is_atomic=False,  # a file that is incomplete never gets its name
        ).publish(version=0)
        if mine:
            save_file(tensors, staging / names[first + transport.rank], metadata={"format": "pt"})
    transport.gather(None)  # all files are written
    if transport.rank == 0:
        if len(files) > 1:
            sizes = {n: prod(size) * (4 if n in fp32 else dtype.itemsize) for n, size in shapes.items()}
            _write_index(staging / "model.safetensors.index.json", files, names, sum(sizes.values()))
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    transport.gather(None)


def _deal(shapes: Mapping[str, tuple[int, ...]], limit: int) -> list[tuple[str, ...]]:
    """Tensors in order into files of at most `limit` elements; a larger tensor has a file of its own."""
    files: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        if files[-1] and held + prod(shape) > limit:
            files.append([])
            held = 0
        files[-1].append(name)
        held += prod(shape)
    return [tuple(file) for file in files]


def _write_index(file: Path, files: Sequence[Sequence[str]], names: Sequence[str], total: int) -> None:
    where = {tensor: name for name, held in zip(names, files, strict=True) for tensor in held}
    file.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n")


def _whole(name: str, shape: tuple[int, ...]) -> ShardSlice:
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return ShardSlice(name, (0,) * len(shape), shape, name, 0, strides)
