"""The weights and optimizer state that one rank saves to a checkpoint and loads from it.

Megatron's distributed optimizer splits a flat buffer of parameters over the data-parallel ranks, so
that a rank has pieces of tensors:

    save   one of the ranks that have a piece of a tensor gathers the other pieces and writes it
    load   each rank reads its own pieces into its optimizer, and all weights into its model

One tensor is gathered or read at a time. The files have Megatron's `fully_reshardable` format,
which any layout can load.
"""

import re
from collections import Counter
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

from megarl.checkpoint.hf_folder import lead_axis, rows_of
from megarl.checkpoint.torch_dist import MegatronFolder, stored_shards
from megarl.models.shards import ShardSlice

# optimizer in Megatron's OptimizerConfig -> its states per parameter, besides the main weight
OPTIMIZER_STATES = {"adam": ("exp_avg", "exp_avg_sq")}


@dataclass(frozen=True, eq=False)
class _Stored:
    """A tensor of the checkpoint, and its elements on each data-parallel rank."""

    tensor: Tensor  # the parameter or buffer
    box: ShardSlice
    shard: Any  # Megatron's ShardedTensor
    optimizer: Any  # Megatron's DistributedOptimizer; None: not trained
    rank: int  # this rank in the optimizer's data-parallel group
    start: int  # first element of the flat parameter whose state is on this rank
    # rank -> [low, high) of the flat parameter whose state is on that rank
    parts: Mapping[int, tuple[int, int]]

    def state(self) -> dict[str, Tensor]:
        """Returns {state: this rank's piece}, with the main weight as "param"."""
        tensors = self.optimizer._get_main_param_and_optimizer_states(self.tensor)
        names = OPTIMIZER_STATES[self.optimizer.config.optimizer]
        low, high = self.parts[self.rank]
        return {
            name: tensors[name].detach().view(-1)[low - self.start : high - self.start]
            for name in ("param", *names)
        }


def parts_of(optimizer: MegatronOptimizer | None) -> list[Any]:
    """Returns the optimizers: a single one, or one for dense and one for expert parameters."""
    if not optimizer:
        return []
    return getattr(optimizer, "chained_optimizers", [optimizer])


def allocate(optimizer: MegatronOptimizer, step: float) -> None:
    """Creates the optimizer state that `load` fills, and sets its step.

    Without this, the state exists only after the first step.
    """
    for part in parts_of(optimizer):
        if part.init_state_fn is not None:
            part.init_state_fn(part.optimizer, part.config)
        elif not part.optimizer.state:  # HybridDeviceOptimizer, of train.optimizer_cpu_offload
            part.optimizer.dummy_step()
        for group in part.optimizer.param_groups:  # Transformer Engine counts steps here
            group["step"] = step
        for state in part.optimizer.state.values():
            if "step" in state or isinstance(part.optimizer, torch.optim.Adam):
                # a separate tensor for each state, because it is incremented in place
                state["step"] = torch.tensor(float(step))


def allocate_unused(optimizer: MegatronOptimizer) -> None:
    """Creates the state of an optimizer before its first step; Megatron needs it for saving."""
    for part in parts_of(optimizer):
        groups = part.optimizer.param_groups
        if not part.optimizer.state and not any(group.get("step") for group in groups):
            allocate(part, 0)


def _stored(
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    prefix: str,
) -> Iterator[_Stored]:
    """Yields the tensors of this rank.

    prefix: prefix of the model's tensor names, in a checkpoint of several models
    """
    pieces = _pieces(optimizer)
    for chunk in chunks:
        for tensor, shard, box in stored_shards(chunk):
            optimizer_part, rank, bounds = pieces.get(tensor, (None, 0, [0]))
            last = box.offset + box.numel
            parts = {}
            for peer, (low, high) in enumerate(pairwise(bounds)):
                overlap = (max(box.offset, low), min(last, high))
                if overlap[0] < overlap[1]:
                    parts[peer] = overlap
            box = replace(box, name=prefix + box.name)
            shard = replace(shard, key=box.name)
            yield _Stored(tensor, box, shard, optimizer_part, rank, bounds[rank], parts)


def _pieces(optimizer: MegatronOptimizer | None) -> dict[Tensor, tuple[Any, int, list[int]]]:
    """Returns {parameter: (optimizer, this rank in its group, bounds of the ranks' pieces)}."""
    pieces = {}
    for part in parts_of(optimizer):
        group = part.data_parallel_group
        for buffer in part.buffers:
            for param, (start, end, number) in buffer.param_index_map.items():
                bucket = buffer.buckets[number]
                share = bucket.grad_data.numel() // group.size()
                bounds = [
                    min(max(rank * share - start + bucket.offset, 0), end - start)
                    for rank in range(group.size() + 1)
                ]
                pieces[param] = part, group.rank(), bounds
    return pieces


@torch.no_grad()
def host_copies(
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    *,
    prefix: str,
) -> list[ShardedTensor]:
    """Returns host copies of the tensors that this rank saves.

    These are tensors of its pipeline chunks and of their optimizer. A collective.
    """
    copies = []
    shared = {part: [] for part in parts_of(optimizer)}
    for stored in _stored(chunks, optimizer, prefix):
        shard = stored.shard
        if stored.optimizer is not None:
            if is_main_replica(shard.replica_id[:-1]):
                shared[stored.optimizer].append(stored)
        elif is_main_replica(shard.replica_id):
            copies.append(replace(shard, data=_host_copy(shard.data)))
    for tensors in shared.values():
        for stored, owner in _owners(tensors).items():
            if stored.rank in stored.parts:
                copies.extend(_copies(stored, owner))
    return copies


def _owners(tensors: Sequence[_Stored]) -> dict[_Stored, int]:
    """Assigns each tensor to the one of its ranks that has the fewest elements to save so far."""
    owners = {}
    elements = Counter()
    fewest_ranks_first = sorted(tensors, key=lambda x: (len(x.parts), -x.box.numel))
    for stored in fewest_ranks_first:
        owners[stored] = min(stored.parts, key=elements.__getitem__)
        elements[owners[stored]] += stored.box.numel
    return owners


def _copies(stored: _Stored, owner: int) -> Iterator[ShardedTensor]:
    """Yields the weights and optimizer state on the tensor's owner, nothing on other ranks."""
    weights = stored.shard.data
    whole = {}
    if stored.rank == owner:
        whole[""] = _host_copy(weights)
    for name, piece in stored.state().items():
        if name == "param" and weights.dtype == torch.float32:
            data = whole.get("", piece)
        else:
            data = _gather(stored, piece, owner)
        whole[f"optimizer.state.{name}."] = data
    if stored.rank != owner:
        return
    for key, data in whole.items():
        data = data.view(weights.shape)
        name = key + stored.box.name
        yield replace(stored.shard, key=name, data=data, dtype=data.dtype, replica_id=0)


def _gather(
    stored: _Stored,
    piece: Tensor,
    owner: int,
) -> Tensor:
    """Returns a host copy: the gathered state [numel] on the owner, `piece` on other ranks."""
    group = stored.optimizer.data_parallel_group
    piece = piece.to(stored.tensor.device)
    if len(stored.parts) == 1:
        return _host_copy(piece)
    whole = piece
    moves = [dist.P2POp(dist.isend, piece, group=group, group_peer=owner)]
    if stored.rank == owner:
        whole = piece.new_empty(stored.box.numel)
        first = stored.box.offset
        moves = []
        for rank, (low, high) in stored.parts.items():
            view = whole[low - first : high - first]
            if rank == owner:
                view.copy_(piece)
            else:
                moves.append(dist.P2POp(dist.irecv, view, group=group, group_peer=rank))
    for work in dist.batch_isend_irecv(moves):
        work.wait()
    return whole.to("cpu")


def _host_copy(tensor: Tensor) -> Tensor:
    """Returns a contiguous host copy, even of a CPU tensor, because training changes the state."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


@torch.no_grad()
def load(
    chunks: Sequence[nn.Module],
    folder: Path,
    optimizer: MegatronOptimizer | None = None,
    *,
    prefix: str = "",
) -> None:
    """Loads this rank's part of a checkpoint that was saved in any layout.

    Raises ValueError, naming the tensor, if the checkpoint lacks it or has another shape.
    """
    checkpoint = MegatronFolder(folder)
    # in older checkpoints of MoE models, keys begin with the optimizer's index, `chained_<n>.`
    keys = {re.sub(r"^chained_\d+\.", "", key): key for key in checkpoint.tensors}
    for stored in _stored(chunks, optimizer, prefix):
        box = stored.box
        shard = stored.shard
        expected = tuple(shard.global_shape), shard.prepend_axis_num, shard.allow_shape_mismatch
        checkpoint.expect(box.name, *expected)
        checkpoint.copy(box, stored.tensor)
        if stored.rank not in stored.parts:
            continue
        first = stored.parts[stored.rank][0] - box.offset
        for name, piece in stored.state().items():
            key = f"optimizer.state.{name}.{box.name}"
            key = keys.get(key, key)
            checkpoint.expect(key, *expected)
            _read_elements(checkpoint, replace(box, name=key), first, piece)
    for part in parts_of(optimizer):
        getattr(part.optimizer, "_sync_hdo_state_to_sub_optimizers", lambda: None)()


def _read_elements(folder: MegatronFolder, box: ShardSlice, first: int, piece: Tensor) -> None:
    """Fills `piece` with the elements of a contiguous slice from `first` on, in row-major order."""
    row = box.strides[lead_axis(box.shape)]
    start, skipped = divmod(first, row)
    rows = rows_of(box, start, -(-(skipped + len(piece)) // row))
    elements = piece
    if rows.numel > len(piece):
        elements = piece.new_zeros(rows.numel)
    folder.copy(replace(rows, offset=0), elements)
    piece.copy_(elements[skipped : skipped + len(piece)])
