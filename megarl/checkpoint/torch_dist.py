"""Reads Megatron distributed checkpoints (`torch_dist`) by tensor, and converts from and to them.

Conversions take names and shapes from `sharded_state_dict`. They read what
`megatron.core.dist_checkpointing.save` writes, and its `load` reads what they write, in any layout.
"""

import io
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from itertools import chain
from math import prod
from operator import floordiv
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from megarl.checkpoint.conversion_map import OutputFile, Shape, StoredTensors, TensorSource
from megarl.checkpoint.hf_folder import lead_axis, row_blocks, split_by_size
from megarl.models.shards import ShardSlice, whole_tensor
from megarl.patches.checkpoints import UnsafePickleError
from megarl.weights.sync.execute import strided_view

# prefixes of the tensor names of models other than the policy
CRITIC = "critic."
REWARD_MODEL = "reward_model."
REFERENCE = "reference."


def is_checkpoint(folder: Path) -> bool:
    return (folder / "metadata.json").is_file() and (folder / ".metadata").is_file()


def stored_shards(model: nn.Module) -> Iterator[tuple[Tensor, ShardedTensor, ShardSlice]]:
    """Yields (parameter or buffer, saved tensor, its slice of the parameter or buffer).

    These are all tensors that Megatron saves of this rank's part of `model`. Gate and up of a fused
    linear layer are two saved tensors.
    """
    # LoRA saves only the adapters, under the names that they have in a PEFT folder
    if "stored_parts" in vars(model):
        for tensor, box, shape, replica in vars(model)["stored_parts"]:
            shard = ShardedTensor(
                box.name,
                strided_view(tensor, box),
                tensor.dtype,
                box.shape,
                shape,
                box.start,
                tuple(map(floordiv, shape, box.shape)),
                replica_id=(0, replica, 0),
            )
            yield tensor, shard, box
        return
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    sharded = _sharded_state(model)
    apply_factories(sharded)
    for name, entry in sharded.items():
        # the names of the same layer in Megatron-Core 0.19 and 0.16
        param = name.replace(".mtp_model_layer.", ".transformer_layer.")
        for shard in nested_values({name: entry}):
            if isinstance(shard, ShardedTensor):
                tensor = tensors[name]
                data = cast(Tensor, shard.data)
                shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
                box = replace(
                    whole_tensor(shard.key, shape),
                    start=tuple(shard.global_offset),
                    param=param,
                    offset=data.storage_offset() - tensor.storage_offset(),
                )
                yield tensor, shard, box


def _sharded_state(model: Any) -> dict[str, Any]:
    """Returns Megatron's `sharded_state_dict`.

    Megatron would look for an output layer even where a value head replaces it.
    """
    is_last = model.post_process
    is_tied = model.share_embeddings_and_output_weights
    model.post_process = is_last and (is_tied or not hasattr(model, "value_head"))
    sharded = model.sharded_state_dict()
    model.post_process = is_last
    return sharded


def stored_objects(model: nn.Module, *, prefix: str = "") -> dict[str, ShardedObject]:
    """Returns Transformer Engine's FP8 state. `prefix`: prefix of its names in the checkpoint."""
    return {
        name: replace(entry, key=prefix + entry.key)
        for name, entry in _sharded_state(model).items()
        if isinstance(entry, ShardedObject)
    }


def stored_tensors(model: nn.Module) -> StoredTensors:
    """Returns the tensors that Megatron saves of `model`.

    The model is a single-rank GPTModel, which may be on the meta device.
    """
    slices = defaultdict(list)
    shapes = {}
    padded = set()
    for _, shard, box in stored_shards(model):
        slices[box.param].append(box)
        shapes[shard.key] = tuple(shard.global_shape)
        if shard.allow_shape_mismatch:
            padded.add(shard.key)
    objects = [entry.unique_key for entry in stored_objects(model).values()]
    return StoredTensors(slices, shapes, frozenset(padded), objects)


class MegatronFolder:
    """A checkpoint's tensors, read slice by slice. Several threads may read."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if its metadata cannot be read."""
        self._folder = folder
        self._reader = FileSystemReader(folder)
        try:
            metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        except UnsafePickleError:
            raise
        except Exception as error:  # a damaged pickle fails in many ways
            raise ValueError(
                f"{folder / '.metadata'} cannot be read ({error!r}); copy the folder again"
            ) from error
        self.tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._num_stacked = {}  # leading dims that count layers or experts
        # (key, indices of the leading dims) -> chunks
        self._chunks = {}

    def expect(
        self,
        key: str,
        shape: Shape,
        num_stacked: int,
        is_padded: bool,
    ) -> None:
        """Raises ValueError unless the checkpoint has the tensor; then `copy` can read it.

        num_stacked: number of leading dims that count layers or experts
        is_padded: the number of rows may differ, because a vocabulary is padded
        """
        metadata = self._folder / ".metadata"
        if key not in self.tensors:
            raise ValueError(
                f"{metadata} has no tensor {key}; is it a checkpoint of another model?"
            )
        whole = self.tensors[key]
        if whole.size != shape and not (is_padded and whole.size[1:] == shape[1:]):
            raise ValueError(
                f"{metadata}: {key} has shape {tuple(whole.size)}, but the model requires {shape}"
            )
        if key in self._num_stacked:
            return
        if sum(prod(chunk.sizes) for chunk in whole.chunks) != prod(whole.size):
            raise ValueError(
                f"{metadata}: the chunks of {key} do not add up to its shape {tuple(whole.size)}"
            )
        self._num_stacked[key] = num_stacked
        for chunk in whole.chunks:  # split the list, because torch searches all of it
            empty = TensorStorageMetadata(whole.properties, whole.size, [])
            layer = tuple(chunk.offsets[:num_stacked])
            self._chunks.setdefault((key, layer), empty).chunks.append(chunk)

    def check(self, stored: StoredTensors) -> None:
        """Raises ValueError, naming tensor and file, unless the files are complete.

        They must have the `stored` tensors. Tensors of optimizers and of other models than the
        policy are ignored; any other tensor raises, too.
        """
        for box in chain.from_iterable(stored.slices.values()):
            shape = stored.shapes[box.name]
            self.expect(box.name, shape, lead_axis(box.shape), box.name in stored.padded)
        for key in self.tensors:
            is_other_model = key.startswith((CRITIC, REWARD_MODEL, REFERENCE))
            if not (key in stored.shapes or "optimizer.state." in key or is_other_model):
                raise ValueError(f"{self._folder / '.metadata'}: tensor {key} is not in this model")
        sizes = {file.name: file.stat().st_size for file in self._folder.glob("*.distcp")}
        for index, place in self._reader.storage_data.items():
            size = sizes.get(place.relative_path, 0)
            end = place.offset + place.length
            if index.fqn in stored.shapes and size < end:
                raise ValueError(
                    f"{self._folder / place.relative_path} has {size} bytes, but {index.fqn} at "
                    f"{tuple(index.offset)} ends at byte {end}: the file is truncated or missing"
                )

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].properties.dtype

    def copy(self, box: ShardSlice, parameter: Tensor) -> None:
        """Copies the slice to its place in `parameter`. Padding rows may be absent.

        Raises ValueError, naming the file, if it cannot be read.
        """
        chunks = self._chunks[box.name, box.start[: self._num_stacked[box.name]]]
        wanted = ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))
        items = create_read_items_for_chunk_list(box.name, chunks, [wanted])
        try:
            self._reader.read_data(LoadPlan(items), _IntoTensor(strided_view(parameter, box)))
        except Exception as error:  # a damaged chunk can fail in as many ways as a zip file
            places = {self._reader.storage_data[item.storage_index].relative_path for item in items}
            files = ", ".join(str(self._folder / place) for place in sorted(places))
            raise ValueError(
                f"{files}: {box.name} at {box.start} cannot be read ({error!r}); copy it again"
            ) from error


class _IntoTensor(DefaultLoadPlanner):
    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._tensor


class MegatronTarget:
    """A conversion target: a file per value of `file_of(param)`, split at `file_bytes`.

    Tensors are chunked by tensor-parallel rank.
    """

    def __init__(
        self,
        source: TensorSource,
        *,
        file_of: Callable[[str], Hashable],
        file_bytes: int,
        tensor_parallel: int,
    ) -> None:
        self._map = source.conversion_map
        self._tensor_parallel = tensor_parallel
        self._dtypes = {}
        by_file = defaultdict(list)
        for param in self._map.stored.slices:
            self._dtypes[param] = source.dtype(param)
            by_file[file_of(param)].append(param)
        groups = []
        for params in by_file.values():
            groups += split_by_size(params, file_bytes, self._nbytes)
        self.files: list[OutputFile] = []
        self._plans = []
        for number, group in enumerate(groups):
            name = f"__{number}_0.distcp"  # torch's name for the file of a rank
            self.files.append(OutputFile(name, tuple(group), sum(map(self._nbytes, group))))
            boxes = chain.from_iterable(map(self._chunks, group))
            self._plans.append(SavePlan(list(map(self._item, boxes))))
        for key in self._map.stored.objects:
            self._plans[0].items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))

    def _nbytes(self, param: str) -> int:
        return self._map.numel(param) * self._dtypes[param].itemsize

    def _chunks(self, param: str) -> Iterator[ShardSlice]:
        for box in self._map.stored.slices[param]:
            yield from row_blocks(box, self._dtypes[param].itemsize, parts=self._tensor_parallel)

    def _item(self, box: ShardSlice) -> WriteItem:
        data = TensorWriteData(
            ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)),
            TensorProperties(self._dtypes[box.param]),
            torch.Size(self._map.stored.shapes[box.name]),
        )
        return WriteItem(MetadataIndex(box.name, box.start), WriteItemType.SHARD, tensor_data=data)

    def write(
        self,
        folder: Path,
        file: OutputFile,
        params: Iterator[tuple[str, Tensor]],
    ) -> list[WriteResult]:
        writer = FileSystemWriter(folder)
        plan = writer.prepare_global_plan(self._plans)[self.files.index(file)]
        chunks = (strided_view(flat, box) for param, flat in params for box in self._chunks(param))
        return writer.write_data(plan, _StreamedChunks(chunks)).wait()

    def rounded(self, param: str, flat: Tensor) -> Tensor:
        return flat

    def finish(self, folder: Path, results: list[list[WriteResult]]) -> None:
        _, metadata = create_default_global_save_plan(self._plans)
        FileSystemWriter(folder).finish(metadata, results)
        torch.save({}, folder / "common.pt")
        save_config(CheckpointingConfig("torch_dist"), str(folder))

    def reopen(self, folder: Path) -> TensorSource:
        written = MegatronFolder(folder)
        written.check(self._map.stored)
        return TensorSource(self._map, self._map.stored.slices, written)


class _StreamedChunks(DefaultSavePlanner):
    """Passes chunks to the writer, which asks for them in the order of its plan."""

    def __init__(self, chunks: Iterator[Tensor]) -> None:
        super().__init__()
        self._chunks = chunks
        self._previous = torch.empty(0)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            empty = io.BytesIO()
            torch.save([None], empty)  # Transformer Engine's state for a layer that was never run
            return empty
        # the writer keeps a reference until its file is finished
        self._previous.untyped_storage().resize_(0)
        self._previous = next(self._chunks).clone()
        return self._previous
