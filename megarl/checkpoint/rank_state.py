"""The weights and optimizer state that one rank saves to a checkpoint and loads from it.

Megatron's distributed optimizer splits a flat buffer of parameters over the data ranks, so that a rank has pieces:

    save   each tensor belongs to one of the ranks that have a piece of it, which gathers the others' and writes it
    load   each rank reads its own pieces into its optimizer, and all weights into its model

One tensor is gathered or read at a time. The files are those of Megatron's `fully_reshardable` format, which would
gather all tensors on all data ranks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from megarl.checkpoint.hf_folder import lead_axis
from megarl.checkpoint.torch_dist import MegatronFolder, stored_entries, stored_slice
from megarl.models.shards import ShardSlice

STATE = ("param", "exp_avg", "exp_avg_sq")  # fp32 weights and Adam's moments


@dataclass(frozen=True, eq=False)
class _Split:
    """Rank r of the optimizer's data ranks has the elements bounds[r]:bounds[r + 1] of the flat parameter."""

    optimizer: Any  # Megatron's DistributedOptimizer
    param: Tensor
    bounds: Sequence[int]

    @property
    def rank(self) -> int:
        return self.optimizer.data_parallel_group.rank()

    def overlaps(self, first: int, last: int) -> dict[int, tuple[int, int]]:
        """The part of [first, last) on each rank that has one."""
        parts = ((max(first, low), min(last, high)) for low, high in zip(self.bounds, self.bounds[1:], strict=False))
        return {rank: (low, high) for rank, (low, high) in enumerate(parts) if low < high}

    def state(self) -> dict[str, Tensor]:
        """This rank's pieces, each of shape [bounds[rank + 1] - bounds[rank]]."""
        tensors = self.optimizer._get_main_param_and_optimizer_states(self.param)
        return {name: tensors[name].detach().view(-1) for name in STATE}


@dataclass(frozen=True, eq=False)
class _Saved:
    """A tensor of the checkpoint, and which ranks have pieces of its optimizer state."""

    shard: ShardedTensor
    split: _Split
    first: int  # of its elements in the flat parameter
    parts: Mapping[int, tuple[int, int]]


def parts_of(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers of dense and of expert parameters."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def allocate(optimizer: MegatronOptimizer) -> None:
    """Create the moments and step counts that loading writes into; otherwise they exist only after the first step."""
    for part in parts_of(optimizer):
        if part.init_state_fn is not None:
            part.init_state_fn(part.optimizer, part.config)
        elif not part.optimizer.state:  # HybridDeviceOptimizer, of train.optimizer_cpu_offload
            part.optimizer.dummy_step()
        if isinstance(part.optimizer, torch.optim.Adam):
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.zeros((), dtype=torch.float32, device="cpu"))


def set_steps(optimizer: MegatronOptimizer, saved: Mapping[Any, Any]) -> None:
    """`saved` is the state_dict of one part; older checkpoints of experts have that of each, by number."""
    step = saved.get(0, saved)["optimizer"]["param_groups"][0].get("step", 0)
    for part in parts_of(optimizer):
        for group in part.optimizer.param_groups:  # where Transformer Engine counts
            group["step"] = step
        for state in part.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(step)


def _splits(optimizer: MegatronOptimizer) -> dict[Tensor, _Split]:
    splits = {}
    for part in parts_of(optimizer):
        ranks = part.data_parallel_group.size()
        for buffer in part.buffers:
            for param, (start, end, number) in buffer.param_index_map.items():
                bucket = buffer.buckets[number]
                share, first = bucket.grad_data.numel() // ranks, start - bucket.offset
                bounds = [min(max(rank * share - first, 0), end - start) for rank in range(ranks + 1)]
                splits[param] = _Split(part, param, bounds)
    return splits


@torch.no_grad()
def host_copies(chunks: Sequence[Any], optimizer: MegatronOptimizer) -> list[ShardedTensor | ShardedObject]:
    """What this rank saves of its pipeline chunks and their optimizer, copied to the host. A collective."""
    splits, copies = _splits(optimizer), []
    saved: dict[Any, list[_Saved]] = {part: [] for part in parts_of(optimizer)}
    for chunk in chunks:
        for _, tensor, shard, first in stored_entries(chunk):
            if isinstance(shard, ShardedObject):
                copies.append(shard)
            elif (split := splits.get(tensor)) is None:  # a buffer, or not trained
                if is_main_replica(shard.replica_id):
                    copies.append(replace(shard, data=_host_copy(shard.data)))
            elif is_main_replica(shard.replica_id[:-1]):
                parts = split.overlaps(first, first + shard.data.numel())
                saved[split.optimizer].append(_Saved(shard, split, first, parts))
    for tensors in saved.values():
        for tensor, owner in _owners(tensors).items():
            copies.extend(_copies(tensor, owner))
    return copies


def _owners(tensors: Sequence[_Saved]) -> dict[_Saved, int]:
    """Assigns each tensor to the one of its ranks that has the fewest elements to save so far."""
    owners, elements = {}, defaultdict[int, int](int)
    for tensor in sorted(tensors, key=lambda tensor: (len(tensor.parts), -tensor.shard.data.numel())):
        owners[tensor] = min(tensor.parts, key=lambda rank: elements[rank])
        elements[owners[tensor]] += tensor.shard.data.numel()
    return owners


def _copies(tensor: _Saved, owner: int) -> Iterator[ShardedTensor]:
    """On its owner the tensor's weights and optimizer state, elsewhere nothing."""
    shard, rank = tensor.shard, tensor.split.rank
    pieces = tensor.split.state() if rank in tensor.parts else {}
    weights = _host_copy(shard.data) if rank == owner else torch.empty(0)
    if rank == owner:
        yield replace(shard, data=weights, replica_id=0)
    for name in STATE if pieces else ():
        is_weights = name == "param" and shard.data.dtype == torch.float32
        whole = weights if is_weights else _gather(tensor, pieces[name], owner)
        if rank == owner:
            data = whole.view(shard.data.shape)
            key = f"optimizer.state.{name}.{shard.key}"
            yield replace(shard, key=key, data=data, dtype=data.dtype, replica_id=0)


def _gather(tensor: _Saved, piece: Tensor, owner: int) -> Tensor:
    """Returns [numel] on the owner's host; `piece` is this rank's of the parameter."""
    split = tensor.split
    start, group = split.bounds[split.rank], split.optimizer.data_parallel_group
    low, high = tensor.parts[split.rank]
    piece = piece[low - start : high - start].to(split.param.device)
    if len(tensor.parts) == 1:
        return _host_copy(piece)
    if split.rank == owner:
        whole = torch.empty(tensor.shard.data.numel(), dtype=piece.dtype, device=piece.device)
        views = {rank: whole[a - tensor.first : b - tensor.first] for rank, (a, b) in tensor.parts.items()}
        views.pop(owner).copy_(piece)
        moves = [dist.P2POp(dist.irecv, view, group=group, group_peer=rank) for rank, view in views.items()]
    else:
        whole, moves = piece, [dist.P2POp(dist.isend, piece, group=group, group_peer=owner)]
    for work in dist.batch_isend_irecv(moves):
        work.wait()
    return whole.to("cpu")


def _host_copy(tensor: Tensor) -> Tensor:
    """A copy even on a CPU, because training changes the state."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


@torch.no_grad()
def load(chunks: Sequence[nn.Module], folder: Path, optimizer: MegatronOptimizer | None = None) -> None:
    """Read this rank's pipeline chunks, and its pieces of their optimizer state, saved in any layout.

    Raises ValueError, naming what differs, if the checkpoint is of another model.
    """
    checkpoint, splits = MegatronFolder(folder), {} if optimizer is None else _splits(optimizer)
    # older checkpoints of experts number the optimizers of dense and of expert parameters
    keys = {re.sub(r"^chained_\d+\.", "", key): key for key in checkpoint.tensors}
    for chunk in chunks:
        for param, tensor, shard, first in stored_entries(chunk):
            if isinstance(shard, ShardedObject):
                continue
            box, shape = stored_slice(param, shard, first), tuple(shard.global_shape)
            options = {"num_stacked": shard.prepend_axis_num, "is_padded": shard.allow_shape_mismatch}
            checkpoint.expect(box.name, shape, **options)
            checkpoint.copy(box, tensor)
            split = splits.get(tensor)
            part = split.overlaps(first, first + box.numel).get(split.rank) if split else None
            if split is None or part is None:
                continue
            for name, piece in split.state().items():
                key = f"optimizer.state.{name}.{box.name}"
                stored = replace(box, name=keys.get(key, key))
                checkpoint.expect(stored.name, shape, **options)
                for cut in _cut(stored, part[0] - first, part[1] - first):
                    checkpoint.copy(replace(cut, offset=cut.offset - split.bounds[split.rank]), piece)
    for part in parts_of(optimizer) if optimizer else ():
        if hasattr(part.optimizer, "_sync_hdo_state_to_sub_optimizers"):
            part.optimizer._sync_hdo_state_to_sub_optimizers()


def _cut(box: ShardSlice, first: int, last: int) -> Iterator[ShardSlice]:
    """The elements first:last of a contiguous slice, in row-major order: whole rows, and parts of rows at both ends."""
    axis = lead_axis(box.shape)
    row = box.strides[axis]
    head = min(last, -(-first // row) * row)
    tail = max(head, last // row * row)
    for begin, end in ((first, head), (head, tail), (tail, last)):
        count = -(-(end - begin) // row)
        if not count:
            continue
        rows = replace(
            box,
            start=(*box.start[:axis], box.start[axis] + begin // row, *box.start[axis + 1 :]),
            shape=(*box.shape[:axis], count, *box.shape[axis + 1 :]),
            offset=box.offset + begin // row * row,
        )
        if (end - begin) % row:
            yield from _cut(rows, begin % row, begin % row + end - begin)
        else:
            yield rows
