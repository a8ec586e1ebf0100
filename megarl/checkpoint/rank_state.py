"""The weights and optimizer state that one rank saves to a checkpoint and loads from it.

Megatron's distributed optimizer splits a flat buffer of parameters over the data ranks, so that a rank has pieces:

    save   each tensor belongs to one of the ranks that have a piece of it, which gathers the others' and writes it
    load   each rank reads its own pieces into its optimizer, and all weights into its model

One tensor is gathered or read at a time. The files are Megatron's `fully_reshardable` ones, for any layout.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from megarl.checkpoint.hf_folder import lead_axis
from megarl.checkpoint.torch_dist import MegatronFolder, stored_shards
from megarl.models.shards import ShardSlice


@dataclass(frozen=True, eq=False)
class _Stored:
    """A tensor of the checkpoint, and where its elements are on the data ranks."""

    tensor: Tensor  # the parameter or buffer
    box: ShardSlice
    shard: Any  # Megatron's ShardedTensor
    optimizer: Any  # Megatron's DistributedOptimizer; None: not trained
    rank: int  # in its group
    start: int  # of this rank's state in the flat parameter
    parts: Mapping[
        int, tuple[int, int]
    ]  # elements of the flat parameter whose state is on a rank, by rank

    def state(self) -> dict[str, Tensor]:
        """This rank's piece of the optimizer state."""
        tensors = self.optimizer._get_main_param_and_optimizer_states(self.tensor)
        low, high = (element - self.start for element in self.parts[self.rank])
        return {
            name: tensors[name].detach().view(-1)[low:high]
            for name in ("param", "exp_avg", "exp_avg_sq")
        }


def parts_of(optimizer: MegatronOptimizer | None) -> list[Any]:
    """One optimizer, or one for dense and one for expert parameters."""
    return getattr(optimizer, "chained_optimizers", [optimizer] if optimizer else [])


def allocate(optimizer: MegatronOptimizer, step: float) -> None:
    """Create the state that loading writes into, which otherwise exists only after the first step, and set its step."""
    for part in parts_of(optimizer):
        if part.init_state_fn is not None:
            part.init_state_fn(part.optimizer, part.config)
        elif not part.optimizer.state:  # HybridDeviceOptimizer, of train.optimizer_cpu_offload
            part.optimizer.dummy_step()
        for group in part.optimizer.param_groups:  # where Transformer Engine counts
            group["step"] = step
        for state in part.optimizer.state.values():
            if "step" in state or isinstance(part.optimizer, torch.optim.Adam):
                state["step"] = torch.tensor(
                    float(step)
                )  # each its own: it is incremented in place


def allocate_unused(optimizer: MegatronOptimizer) -> None:
    """Create the state of an optimizer that has taken no step, which Megatron cannot save otherwise."""
    for part in parts_of(optimizer):
        if not part.optimizer.state and not any(
            group.get("step") for group in part.optimizer.param_groups
        ):
            allocate(part, 0)


def _stored(
    chunks: Sequence[nn.Module], optimizer: MegatronOptimizer | None, prefix: str
) -> Iterator[_Stored]:
    """`prefix`: of the names in the checkpoint, where it has several models."""
    bounds_of = {}
    for part in parts_of(optimizer):
        ranks = part.data_parallel_group.size()
        for buffer in part.buffers:
            for param, (start, end, number) in buffer.param_index_map.items():
                bucket = buffer.buckets[number]
                share, first = bucket.grad_data.numel() // ranks, start - bucket.offset
                bounds = [
                    min(max(rank * share - first, 0), end - start) for rank in range(ranks + 1)
                ]
                bounds_of[param] = part, part.data_parallel_group.rank(), bounds
    for chunk in chunks:
        for tensor, shard, box in stored_shards(chunk):
            part, rank, bounds = bounds_of.get(tensor, (None, 0, (0,)))
            first, last = box.offset, box.offset + box.numel
            overlaps = ((max(first, low), min(last, high)) for low, high in pairwise(bounds))
            parts = {peer: (low, high) for peer, (low, high) in enumerate(overlaps) if low < high}
            shard, box = (
                replace(shard, key=prefix + shard.key),
                replace(box, name=prefix + box.name),
            )
            yield _Stored(tensor, box, shard, part, rank, bounds[rank], parts)


@torch.no_grad()
def host_copies(
    chunks: Sequence[nn.Module], optimizer: MegatronOptimizer | None, *, prefix: str = ""
) -> list[ShardedTensor]:
    """The tensors that this rank saves of its pipeline chunks and their optimizer, on the host. A collective."""
    copies, shared = [], {part: [] for part in parts_of(optimizer)}
    for stored in _stored(chunks, optimizer, prefix):
        if stored.optimizer is None and is_main_replica(stored.shard.replica_id):
            copies.append(replace(stored.shard, data=_host_copy(stored.shard.data)))
        elif stored.optimizer is not None and is_main_replica(stored.shard.replica_id[:-1]):
            shared[stored.optimizer].append(stored)
    for tensors in shared.values():
        for stored, owner in _owners(tensors).items():
            if stored.rank in stored.parts:
                copies.extend(_copies(stored, owner))
    return copies


def _owners(tensors: Sequence[_Stored]) -> dict[_Stored, int]:
    """Assigns each tensor to the one of its ranks that has the fewest elements to save so far."""
    owners, elements = {}, defaultdict[int, int](int)
    for stored in sorted(tensors, key=lambda stored: (len(stored.parts), -stored.box.numel)):
        owners[stored] = min(stored.parts, key=lambda rank: elements[rank])
        elements[owners[stored]] += stored.box.numel
    return owners


def _copies(stored: _Stored, owner: int) -> Iterator[ShardedTensor]:
    """Weights and optimizer state on the tensor's owner, nothing on the other ranks that have a piece."""
    weights = stored.shard.data
    whole = {"": _host_copy(weights)} if stored.rank == owner else {}
    for name, piece in stored.state().items():
        is_weights = name == "param" and weights.dtype == torch.float32
        key = f"optimizer.state.{name}."
        whole[key] = whole.get("", piece) if is_weights else _gather(stored, piece, owner)
    for key, data in whole.items() if stored.rank == owner else ():
        key, data = key + stored.box.name, data.view(weights.shape)
        yield replace(stored.shard, key=key, data=data, dtype=data.dtype, replica_id=0)


def _gather(stored: _Stored, piece: Tensor, owner: int) -> Tensor:
    """Returns [numel] on the owner's host."""
    group, piece = stored.optimizer.data_parallel_group, piece.to(stored.tensor.device)
    if len(stored.parts) == 1:
        return _host_copy(piece)
    whole, moves = piece, [dist.P2POp(dist.isend, piece, group=group, group_peer=owner)]
    if stored.rank == owner:
        whole, first = piece.new_empty(stored.box.numel), stored.box.offset
        views = {
            rank: whole[low - first : high - first] for rank, (low, high) in stored.parts.items()
        }
        views.pop(owner).copy_(piece)
        moves = [
            dist.P2POp(dist.irecv, view, group=group, group_peer=rank)
            for rank, view in views.items()
        ]
    for work in dist.batch_isend_irecv(moves):
        work.wait()
    return whole.to("cpu")


def _host_copy(tensor: Tensor) -> Tensor:
    """A copy even on a CPU, because training changes the state."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


@torch.no_grad()
def load(
    chunks: Sequence[nn.Module],
    folder: Path,
    optimizer: MegatronOptimizer | None = None,
    *,
    prefix: str = "",
) -> None:
    """Read this rank's part of a checkpoint, saved in any layout. Raises ValueError, naming what differs."""
    checkpoint = MegatronFolder(folder)
    # older checkpoints of experts number the optimizers of dense and of expert parameters
    keys = {re.sub(r"^chained_\d+\.", "", key): key for key in checkpoint.tensors}
    for stored in _stored(chunks, optimizer, prefix):
        box, shard = stored.box, stored.shard
        expected = tuple(shard.global_shape), shard.prepend_axis_num, shard.allow_shape_mismatch
        checkpoint.expect(box.name, *expected)
        checkpoint.copy(box, stored.tensor)
        for name, piece in stored.state().items() if stored.rank in stored.parts else ():
            key = f"optimizer.state.{name}.{box.name}"
            key, (low, high) = keys.get(key, key), stored.parts[stored.rank]
            checkpoint.expect(key, *expected)
            for cut in _cut(replace(box, name=key), low - box.offset, high - box.offset):
                checkpoint.copy(replace(cut, offset=cut.offset - low), piece)
    for part in parts_of(optimizer):
        getattr(part.optimizer, "_sync_hdo_state_to_sub_optimizers", lambda: None)()


def _cut(box: ShardSlice, first: int, last: int) -> Iterator[ShardSlice]:
    """The elements first:last of a contiguous slice, in row-major order: whole rows, and parts of rows at both ends."""
    axis = lead_axis(box.shape)
    row = box.strides[axis]
    head = min(last, -(-first // row) * row)
    tail = max(head, last // row * row)
    for begin, end in ((first, head), (head, tail), (tail, last)):
        if begin == end:
            continue
        start, shape = list(box.start), list(box.shape)
        start[axis] += begin // row
        shape[axis] = -(-(end - begin) // row)
        rows = replace(
            box, start=tuple(start), shape=tuple(shape), offset=box.offset + begin // row * row
        )
        yield from (
            _cut(rows, begin % row, begin % row + end - begin) if (end - begin) % row else [rows]
        )
