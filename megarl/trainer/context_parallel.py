"""Splits rows over the context-parallel ranks in zig-zag order, and computes causal attention across them.

With C context ranks, a row is padded to 2 C chunks of equal length; rank r gets chunks r and 2 C - 1 - r, so every rank
scores the same number of query-key pairs:

    row        | 0 | 1 | 2 | 3 |        C = 2
    rank 0     | 0 | 3 |                rank 1     | 1 | 2 |

Megatron's rotary embedding and Transformer Engine's attention split packed rows the same way. The attention here runs
on a CPU: keys and values are gathered, and each chunk of queries attends to the keys up to itself.
Shapes: P padded positions of all rows end to end, Q = P / C of them here, H query heads, G key/value heads, D, E.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from megarl.layout import Axis


def row_multiple(context: int) -> int:
    """Returns the number of which every row's padded length must be a multiple."""
    return 2 * context if context > 1 else 1


def local_positions(lengths: Sequence[int], context: Axis) -> Tensor:
    """Returns [Q] int64: which of the P positions of these padded rows are on this rank, in its order."""
    parts = [torch.arange(0)]
    for row_L in torch.arange(sum(lengths)).split([*lengths]):
        chunks = row_L.view(row_multiple(context.size), -1)
        parts += [chunks[i] for i in _chunks(context)]
    return torch.cat(parts)


def _chunks(context: Axis) -> tuple[int, ...]:
    """The chunks of a row that are on this rank; a row that is not split is one chunk."""
    return (context.rank, 2 * context.size - 1 - context.rank) if context.size > 1 else (0,)


# (q [R, H, L, D], k [R, G, K, D], v [R, G, K, E], distances [R, L, K] or None) -> [R, H, L, E]
Score = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class RowStack:
    """Chunks of similar length, padded to the longest, for one `Score` call. Padding repeats a row's first position."""

    query_RL: Tensor  # [R, L] int64: positions of the queries
    key_RK: Tensor  # [R, K] int64: positions of the keys
    distance_RLK: (
        Tensor | None
    )  # [R, L, K]: how far each key precedes each query; None: q and k are whole rows
    real: Tensor  # [S] int64: which of the R * L queries are not padding


def attend(
    query_QHD: Tensor,
    key_QGD: Tensor,
    value_QGE: Tensor,
    lengths: Sequence[int],
    group: ProcessGroup | None,  # the context ranks; None: rows are not split
    score: Score,
) -> Tensor:  # [Q, H * E]
    """Causal attention within each of the rows of these padded lengths; differentiable across the context ranks."""
    context, key_PGD, value_PGE = Axis(1, 0), key_QGD, value_QGE
    if group is not None:
        context = Axis(group.size(), dist.get_rank(group))
        positions = torch.cat(
            [local_positions(lengths, Axis(context.size, rank)) for rank in range(context.size)]
        )
        gathered = gather_from_sequence_parallel_region(
            torch.cat([key_QGD, value_QGE], -1), group=group
        )
        in_order = gathered.index_select(0, positions.argsort().to(gathered.device))
        key_PGD, value_PGE = in_order.split([key_QGD.shape[-1], value_QGE.shape[-1]], -1)
    return attend_stacks(query_QHD, key_PGD, value_PGE, list(_stacks(lengths, context)), score)


def attend_stacks(
    query_QHD: Tensor, key_PGD: Tensor, value_PGE: Tensor, stacks: Sequence[RowStack], score: Score
) -> Tensor:  # [Q, H * E]
    """Attention of each stack, in the order of the positions of its queries."""
    outputs, positions = [], []
    for stack in stacks:
        q, k, v = (
            x.index_select(0, index.flatten().to(x.device))
            .unflatten(0, index.shape)
            .transpose(1, 2)
            for x, index in (
                (query_QHD, stack.query_RL),
                (key_PGD, stack.key_RK),
                (value_PGE, stack.key_RK),
            )
        )
        out = score(
            q, k, v, None if stack.distance_RLK is None else stack.distance_RLK.to(q.device)
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, stack.real.to(out.device)))
        positions.append(stack.query_RL.flatten()[stack.real])
    order = torch.cat(positions).argsort().to(query_QHD.device)
    return torch.cat(outputs).index_select(0, order).flatten(1)


def shared_stacks(lengths: Sequence[int], slot_P: Tensor, is_own_P: Tensor) -> Iterator[RowStack]:
    """Whole rows whose position p is computed at `slot_P[p]`; an output is kept where `is_own_P`, once per slot."""
    for stack in _stacks(lengths, Axis(1, 0)):
        real = stack.real[is_own_P[stack.query_RL.flatten()[stack.real]]]
        yield RowStack(slot_P[stack.query_RL], slot_P[stack.key_RK], None, real)


def _stacks(lengths: Sequence[int], context: Axis) -> Iterator[RowStack]:
    """The queries of this rank's chunks, and the keys of each row up to them."""
    start_N = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    size_N = torch.tensor(lengths) // row_multiple(context.size)
    for index, chunk in enumerate(_chunks(context)):
        for rows in _similar(size_N.tolist()):
            start_R1, size_R1 = start_N[rows, None], size_N[rows, None]
            longest = int(size_R1.max())
            query_L, key_K = torch.arange(longest), torch.arange((chunk + 1) * longest)
            is_real = query_L < size_R1
            query_RL = start_R1 // context.size + index * size_R1 + torch.where(is_real, query_L, 0)
            key_RK = start_R1 + torch.where(key_K < (chunk + 1) * size_R1, key_K, 0)
            distance_RLK = (
                None if context.size == 1 else (chunk * size_R1 + query_L)[..., None] - key_K
            )
            yield RowStack(query_RL, key_RK, distance_RLK, is_real.flatten().nonzero().flatten())


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Groups indices of nonzero lengths by their next power of two, so that padding at most doubles the tokens."""
    classes: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        if length:
            classes.setdefault((length - 1).bit_length(), []).append(row)
    return list(classes.values())
