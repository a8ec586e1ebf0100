"""Exports the actor's weights as a Hugging Face folder; no rank holds the whole model.

    tensors --split by size--> one file per rank at a time
      --Publisher (plan, checksums)--> safetensors + index

In each round the files stand in for the engine of an ordinary weight sync, so an export is verified
like one.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
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
from megarl.platform.json_text import read_json
from megarl.processes.files import write_json
from megarl.weights.encode.quantize import PLAIN, Storage
from megarl.weights.plan.tables import SlicesByRank
from megarl.weights.sync.execute import MemoryReceiver, Parameters
from megarl.weights.sync.publish import Publisher, WeightFormat, WeightSender, plan_slices
from megarl.weights.sync.transports import Transport

FILE_BYTES = 4 << 30
ROUND_BYTES = 256 << 20  # received by a rank at a time


def export_hf(
    folder: Path,
    *,
    origin: Path | None,  # folder of config and tokenizer; None: adapters, in one file
    weights: WeightFormat,  # every tensor of the checkpoint
    sources: SlicesByRank,  # [rank] -> slices of the tensors in its parameters
    parameters: Callable[[], Parameters],
    transport: Transport,
    storage: Storage = PLAIN,  # tensors that are quantised in the files
    # file: keys that differ from the origin's
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes `folder` completely or not at all, replacing an older one. A collective.

    Raises CheckFailed, on all ranks, if a tensor is missing or arrives corrupted.
    """
    staging = folder.with_name(f".{folder.name}.part")
    if transport.rank == 0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        if origin is not None:
            copy_model_files(origin, staging)
        for name, values in (changes or {}).items():
            file = staging / name
            old = read_json(file) if file.is_file() else {}
            write_json(file, old | dict(values))
        if not storage.names:
            drop_quantization(staging)
    transport.gather(None)  # the folder exists, with all files but those of weights
    shapes = weights.shapes
    sizes = {name: prod(shape) * weights.dtype_of(name).itemsize for name, shape in shapes.items()}
    if origin is None:
        files = [list(sizes)]
        names = [WEIGHTS]
    else:
        files = split_by_size(sizes, file_bytes, sizes.__getitem__)
        names = file_names(len(files))
    for first in range(0, len(files), transport.world):
        round_ = files[first : first + transport.world]
        part = {name: shapes[name] for name in chain.from_iterable(round_)}
        tensors = _receive(round_, replace(weights, shapes=part), sources, parameters, transport)
        if tensors:
            stored = {}
            for name in list(tensors):  # one tensor at a time in both formats
                stored |= storage.encode(name, tensors.pop(name))
            save_file(stored, staging / names[first + transport.rank], metadata={"format": "pt"})
    transport.gather(None)  # all files are written
    if transport.rank == 0:
        write_index(staging)
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    transport.gather(None)


def _receive(
    files: Sequence[Sequence[str]],
    weights: WeightFormat,
    sources: SlicesByRank,
    parameters: Callable[[], Parameters],
    transport: Transport,
) -> dict[str, Tensor]:
    """Moves the tensors of a file per rank; returns those of this rank's, if any."""
    local = []
    for slices in sources:
        local.append([part for part in slices if part.name in weights.shapes])
    whole = []
    for file in files:
        tensors = [whole_tensor(name, weights.shapes[name]) for name in file]
        whole.append(weights.moved_slices(tensors))
    whole += [[]] * (transport.world - len(files))
    received = {}
    receiver = None
    if transport.rank < len(files):
        received = {
            name: torch.empty(weights.shapes[name], dtype=weights.dtype_of(name), device="cpu")
            for name in files[transport.rank]
        }
        device = next(iter(parameters().values())).device
        receiver = MemoryReceiver(whole[transport.rank], received, weights.dtype, device)
    plan = plan_slices(
        weights,
        local,
        whole,
        ranks_per_replica=len(files),
        round_bytes=ROUND_BYTES,
    )
    Publisher(
        plan,
        WeightSender(local[transport.rank], parameters),
        receiver,
        transport,
        weights,
        ranks_per_replica=len(files),
        is_atomic=False,  # an incomplete file never gets its final name
    ).publish(version=0)
    return received
