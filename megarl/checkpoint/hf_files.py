"""Writes Hugging Face folders: exports of the actor's weights, and the target of conversions.

    tensors --split by size--> one file per rank at a time
      --Publisher (plan, checksums)--> safetensors + index

No rank holds the whole model. Each round of an export is a weight sync in which files take the
place of the engine, and is verified like a weight sync.
"""

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from operator import add
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.checkpoint.conversion_map import OutputFile, Shape, TensorSource
from megarl.checkpoint.hf_folder import HfFolder, hf_source, split_by_size
from megarl.models.formats import CONFIG_KEY
from megarl.models.headers import INDEX, ITEM_BYTES, read_headers
from megarl.models.hub import copied_files
from megarl.models.lora import WEIGHTS
from megarl.models.shards import ShardSlice, whole_tensor, without_pairs
from megarl.platform.json_text import read_json
from megarl.processes.files import sync_path, write_json
from megarl.weights.encode.quantize import DTYPES, PLAIN, Storage
from megarl.weights.plan.tables import SlicesByRank
from megarl.weights.sync.execute import MemoryReceiver, Parameters, strided_view
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
    # file name -> JSON keys that differ from the origin's
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes `folder` completely or not at all, replacing an older folder. A collective.

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
            drop_format(staging)
    transport.gather(None)  # wait until the folder has all files except the weights
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
            for name in list(tensors):  # only one tensor is in memory in both formats
                stored |= storage.encode(name, tensors.pop(name))
            save_file(stored, staging / names[first + transport.rank], metadata={"format": "pt"})
    transport.gather(None)  # wait until all files are written
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
    """Moves the tensors of one file to each rank. Returns this rank's tensors, or {}."""
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
        is_atomic=False,  # an incomplete file never gets its final name
    ).publish(version=0)
    return received


class HfTarget:
    """A conversion target: safetensors files.

    A file has at most `file_bytes`, unless a single tensor or parameter is larger. `storage`: the
    tensors that are quantised, and their format.
    """

    def __init__(
        self,
        source: TensorSource,
        *,
        file_bytes: int,
        storage: Storage,
    ) -> None:
        self._map = source.conversion_map
        self._storage = storage
        self._dtypes = {}
        # first tensor -> parameters: a layer's experts may share a tensor, and hence a file
        params = defaultdict(list)
        for param, boxes in self._map.hf_slices.items():
            params[boxes[0].name].append(param)
            for box in boxes:
                self._dtypes[box.name] = source.dtype(param)
        groups = split_by_size(params.values(), file_bytes, self._nbytes)
        self.files: list[OutputFile] = []
        for name, group in zip(file_names(len(groups)), groups, strict=True):
            members = tuple(chain.from_iterable(group))
            self.files.append(OutputFile(name, members, self._nbytes(members)))

    def _names(self, params: Iterable[str]) -> Iterable[str]:
        boxes = chain.from_iterable(map(self._map.hf_slices.__getitem__, params))
        return dict.fromkeys(box.name for box in boxes)

    def _parts(self, params: Iterable[str]) -> dict[str, tuple[str, Shape]]:
        """Returns {stored name: (dtype, shape)} for the HF tensors of these parameters."""
        parts = {}
        for name in self._names(params):
            parts |= self._storage.parts(name, self._map.hf_shapes[name], self._dtypes[name])
        return parts

    def _nbytes(self, params: Iterable[str]) -> int:
        return sum(prod(shape) * ITEM_BYTES[dtype] for dtype, shape in self._parts(params).values())

    def write(
        self,
        folder: Path,
        file: OutputFile,
        params: Iterator[tuple[str, Tensor]],
    ) -> None:
        tensors = {
            name: torch.empty(shape, dtype=DTYPES[dtype])
            for name, (dtype, shape) in self._parts(file.params).items()
        }
        for param, flat in params:
            for box in self._map.hf_slices[param]:
                if box.name not in self._storage.names:
                    _inside(tensors[box.name], box).copy_(strided_view(flat, box))
            for name, index, matrix, _ in self._matrices(param, flat):
                for part_name, part in self._storage.encode(name, matrix).items():
                    tensors[part_name][index] = part
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
        sync_path(folder / file.name)

    def rounded(self, param: str, flat: Tensor) -> Tensor:
        """Returns the parameter as it will be read back."""
        result = flat
        for _, index, matrix, boxes in self._matrices(param, flat):
            if result is flat:
                result = flat.clone()
            back = self._storage.round(matrix)
            for box in boxes:
                strided_view(result, box).copy_(_inside(back, box, len(index)))
        return result

    def _matrices(
        self, param: str, flat: Tensor
    ) -> Iterator[tuple[str, Shape, Tensor, list[ShardSlice]]]:
        """Yields (tensor, index in it, matrix, slices) for a parameter's quantised matrices."""
        for name in self._names([param]):
            if name not in self._storage.names:
                continue
            boxes = [box for box in self._map.hf_slices[param] if box.name == name]
            *lead, rows, columns = self._map.hf_shapes[name]
            matrix = torch.empty(rows, columns, dtype=flat.dtype)
            for box in boxes:
                _inside(matrix, box, len(lead)).copy_(strided_view(flat, box))
            yield name, boxes[0].start[: len(lead)], matrix, boxes

    def finish(self, folder: Path, results: list[None]) -> None:
        write_index(folder)
        if not self._storage.names:
            drop_format(folder)

    def reopen(self, folder: Path) -> TensorSource:
        written = HfFolder(folder)
        written.check(self._map.hf_shapes)
        return hf_source(self._map, written)


def file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_index(folder: Path) -> None:
    """Writes the index of the folder's files, unless there is a single file."""
    tensors = read_headers(folder)
    weight_map = {name: tensor.file.name for name, tensor in tensors.items()}
    if len(set(weight_map.values())) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def copy_model_files(source: Path, folder: Path) -> None:
    """Copies config, tokenizer and its code, but no index and no Megatron metadata.json."""
    for file in copied_files(source):
        shutil.copyfile(file, folder / file.name)


def drop_format(folder: Path) -> None:
    """Removes the block format from the config.json of weights that are no longer in it."""
    file = folder / "config.json"
    if not file.is_file():
        return
    values = read_json(file)
    if CONFIG_KEY in values:
        del values[CONFIG_KEY]
        write_json(file, values)


def _inside(tensor: Tensor, box: ShardSlice, lead: int = 0) -> Tensor:
    """Returns the values of slice `box` as a view of `tensor`, with the shape of the slice.

    `tensor` is the slice's HF tensor, or one index of its first `lead` dims (an expert, say).
    """
    start, shape = without_pairs(box, lead + tensor.dim())
    ranges = map(slice, start[lead:], map(add, start[lead:], shape[lead:]))
    return tensor[tuple(ranges)].view(box.shape)
