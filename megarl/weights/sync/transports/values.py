"""Exchanges small control values between ranks safely: torch.distributed's object collectives
unpickle what a peer sends, which can run any code."""

import pickle
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megarl.models.shards import ShardSlice
from megarl.types import CheckFailed

KNOWN: list[Any] = [ShardSlice]


def carry(*types: type) -> None:
    """Adds dataclasses of plain values to the types that ranks may send each other. Every rank that
    receives such a value must have called this."""
    KNOWN.extend(types)


def gather_values(value: Any, group: Any = None) -> list[Any]:
    """A collective. Returns the value of every rank, by rank. Values may be tensors, Python's plain
    types and containers, and KNOWN types. Raises CheckFailed if a rank sends anything else, without
    running it."""
    own = to_bytes(value)
    sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([own.numel()]), group=group)
    longest = int(sizes.max())
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, pad(own, (0, longest - own.numel())), group=group)
    return [_load(part[: sizes[rank]], rank) for rank, part in enumerate(parts)]


def to_bytes(value: Any) -> Tensor:
    """Returns the serialized value, [bytes] uint8."""
    stream = BytesIO()
    torch.save(value, stream)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


def from_bytes(data: Tensor) -> Any:
    """Returns the value that `to_bytes` serialized.

    Raises UnpicklingError for types that `gather_values` does not accept, without running them.
    """
    with torch.serialization.safe_globals(KNOWN):
        return torch.load(BytesIO(data.numpy().tobytes()), weights_only=True)


def _load(data: Tensor, rank: int) -> Any:
    try:
        return from_bytes(data)
    except pickle.UnpicklingError as error:
        raise CheckFailed(
            f"rank {rank} sent what is not a value of megarl, and it was not run: "
            f"{str(error).partition('. ')[0]}"
        ) from error
