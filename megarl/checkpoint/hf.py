"""Exports the actor's weights as a Hugging Face folder: all ranks write files, and none holds the whole model.

    tensors --split by size--> one file per rank at a time --Publisher (plan, checksums)--> safetensors + index

In each round the files stand in for the engine of an ordinary weight sync, so an export is verified like one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.checkpoint.hf_files import copy_model_files, drop_quantization, file_names, write_index
from megarl.checkpoint.hf_folder import split_by_size
from megarl.models.lora import WEIGHTS
from megarl.models.shards import whole_tensor
from megarl.platform.json_text import parse_json
from megarl.weights.execute import MemoryReceiver
from megarl.weights.placements import SlicesByRank
from megarl.weights.publish import Publisher, WeightFormat, WeightSender, plan_slices
from megarl.weights.quantize import PLAIN, Storage
from megarl.weights.transports import Transport

FILE_BYTES = 4 << 30
ROUND_BYTES = 256 << 20  # received by a rank at a time


def export_hf(
    folder: Path,
    *,
    origin: Path | None,  # folder of config and tokenizer; None: adapters, in one file
    weights: WeightFormat,  # every tensor of the checkpoint
    sources: SlicesByRank,  # [rank] -> slices of the tensors in its parameters
    parameters: Callable[[], Mapping[str, Tensor]],
    transport: Transport,
    storage: Storage = PLAIN,  # tensors that are quantised in the files
    changes: Mapping[str, Mapping[str, Any]]
    | None = None,  # file: keys that differ from the origin's
    file_bytes: int = FILE_BYTES,
) -> None:
    """A collective. Writes `folder` completely or not at all, replacing an older one. Raises CheckFailed, on all ranks,
    if a tensor is missing or arrives corrupted."""
    staging = folder.with_name(f".{folder.name}.part")
    if transport.rank == 0:
        _begin(staging, origin, changes or {}, is_plain=not storage.names)
    transport.gather(None)  # the folder exists
    shapes = weights.shapes
    sizes = {name: prod(shape) * weights.dtype_of(name).itemsize for name, shape in shapes.items()}
    files = split_by_size(
        sizes, sum(sizes.values()) if origin is None else file_bytes, sizes.__getitem__
    )
    names = [WEIGHTS] if origin is None else file_names(len(files))
    device = next(iter(parameters().values())).device
    for first in range(0, len(files), transport.world):
        round_ = files[first : first + transport.world]
        weights = replace(weights, shapes={name: shapes[name] for file in round_ for name in file})
        local = [[part for part in slices if part.name in weights.shapes] for slices in sources]
        whole = [
            weights.moved_slices([whole_tensor(name, shapes[name]) for name in file])
            for file in round_
        ]
        whole += [[]] * (transport.world - len(round_))
        mine = round_[transport.rank] if transport.rank < len(round_) else ()
        tensors = {
            name: torch.empty(shapes[name], dtype=weights.dtype_of(name), device="cpu")
            for name in mine
        }
        Publisher(
            plan_slices(
                weights, local, whole, ranks_per_replica=len(round_), round_bytes=ROUND_BYTES
            ),
            WeightSender(local[transport.rank], parameters),
            MemoryReceiver(whole[transport.rank], tensors, weights.dtype, device) if mine else None,
            transport,
            weights,
            ranks_per_replica=len(round_),
            is_atomic=False,  # an incomplete file never gets its final name
        ).publish(version=0)
        if mine:
            stored: dict[str, Tensor] = {}
            for name in mine:  # one tensor at a time in both formats
                stored |= storage.encode(name, tensors.pop(name))
            save_file(stored, staging / names[first + transport.rank], metadata={"format": "pt"})
    transport.gather(None)  # all files are written
    if transport.rank == 0:
        write_index(staging)
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    transport.gather(None)


def _begin(
    staging: Path, origin: Path | None, changes: Mapping[str, Mapping[str, Any]], *, is_plain: bool
) -> None:
    """Makes the folder, with all files but those of weights."""
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    if origin is not None:
        copy_model_files(origin, staging)
    for name, values in changes.items():
        old = parse_json((staging / name).read_bytes()) if (staging / name).is_file() else {}
        (staging / name).write_text(
            json.dumps(old | dict(values), indent=2) + "\n", encoding="utf-8"
        )
    if is_plain:
        drop_quantization(staging)
