"""Rows split over the context ranks, zig-zag, and causal attention across them.

A row is padded to 2 C chunks of one length, C context ranks; rank r has chunks r and 2 C - 1 - r, so every rank scores
equally many pairs of query and key:

    row        | 0 | 1 | 2 | 3 |        C = 2
    rank 0     | 0 | 3 |                rank 1     | 1 | 2 |

Megatron's rotary embedding and Transformer Engine's attention split packed rows the same way. The attention here runs
on a CPU: keys and values are gathered, and each chunk of queries attends to the keys up to itself.
Shapes: P padded positions of all rows end to end, Q = P / C of them here, H query heads, G key/value heads, D, E.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from megarl.layout import Axis

__all__ = ["RowStack", "attend", "attend_rows", "local_positions", "row_multiple", "whole_rows"]


def row_multiple(context: int) -> int:
    """The padded length of a row is a multiple of this."""
    return 2 * context if context > 1 else 1


def local_positions(lengths: Sequence[int], context: Axis) -> Tensor:
    """[Q] int64: which of the P positions of these padded rows are on this rank, in its order."""
    if context.size == 1:
        return torch.arange(sum(lengths))
    parts, start = [torch.arange(0)], 0
    for length in lengths:
        chunk = length // (2 * context.size)
        parts += [torch.arange(start + i * chunk, start + (i + 1) * chunk) for i in _chunks(context)]
        start += length
    return torch.cat(parts)


def _chunks(context: Axis) -> tuple[int, int]:
    return context.rank, 2 * context.size - 1 - context.rank


# (q [R, H, L, D], k [R, G, K, D], v [R, G, K, E], distances [R, L, K] or None) -> [R, H, L, E]
Score = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class RowStack:
    """Rows of similar length, padded to the longest: one call of `Score`. Padding repeats a row's first position."""

    query_RL: Tensor  # [R, L] int64: positions of the queries
    key_RK: Tensor  # [R, K] int64: positions of the keys
    distance_RLK: Tensor | None  # [R, L, K]: how far each key precedes each query; None: queries and keys are the rows
    real: Tensor  # [S] int64: which of the R * L queries are not padding


def attend_rows(
    query_QHD: Tensor, key_PGD: Tensor, value_PGE: Tensor, stacks: Sequence[RowStack], score: Score
) -> Tensor:  # [Q, H * E]
    """Attention within rows, whose stacks have each position of Q once."""
    outputs, positions = [], []
    for stack in stacks:
        q, k, v = (
            x.index_select(0, index.flatten().to(x.device)).unflatten(0, index.shape).transpose(1, 2)
            for x, index in ((query_QHD, stack.query_RL), (key_PGD, stack.key_RK), (value_PGE, stack.key_RK))
        )
        out = score(q, k, v, None if stack.distance_RLK is None else stack.distance_RLK.to(q.device))
        outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, stack.real.to(out.device)))
        positions.append(stack.query_RL.flatten()[stack.real])
    order = torch.cat(positions).argsort().to(query_QHD.device)
    return torch.cat(outputs).index_select(0, order).flatten(1)


def whole_rows(lengths: Sequence[int]) -> list[RowStack]:
    """Rows of these lengths end to end; a stack's lengths have the same next power of two."""
    start_N, length_N, stacks = torch.tensor([0, *lengths]).cumsum(0), torch.tensor(lengths), []
    for rows in _similar(lengths):
        position_L = torch.arange(int(length_N[rows].max()))
        is_real = position_L < length_N[rows, None]
        index_RL = start_N[rows, None] + torch.where(is_real, position_L, 0)
        stacks.append(RowStack(index_RL, index_RL, None, is_real.flatten().nonzero().flatten()))
    return stacks


def attend(
    query_QHD: Tensor, key_QGD: Tensor, value_QGE: Tensor, lengths: Sequence[int], group: ProcessGroup, score: Score
) -> Tensor:  # [Q, H * E]
    """Causal attention within each of the rows of these padded lengths; differentiable across the context ranks."""
    context = Axis(group.size(), dist.get_rank(group))
    positions = torch.cat([local_positions(lengths, Axis(context.size, rank)) for rank in range(context.size)])
    order_P = positions.argsort().to(key_QGD.device)
    gathered = gather_from_sequence_parallel_region(torch.cat([key_QGD, value_QGE], -1), group=group)
    key_PGD, value_PGE = gathered.index_select(0, order_P).split([key_QGD.shape[-1], value_QGE.shape[-1]], -1)
    stacks = [
        stack
        for half, chunk in enumerate(_chunks(context))
        for stack in _chunk_stacks(lengths, context.size, chunk, half)
    ]
    return attend_rows(query_QHD, key_PGD, value_PGE, stacks, score)


def _chunk_stacks(lengths: Sequence[int], size: int, chunk: int, half: int) -> list[RowStack]:
    """Queries of chunk `chunk` of each row, which is this rank's first or second (`half`), and the keys up to it."""
    start_N = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    size_N, stacks = torch.tensor(lengths) // (2 * size), []
    for rows in _similar(size_N.tolist()):
        start_R1, size_R1 = start_N[rows, None], size_N[rows, None]
        longest = int(size_R1.max())
        query_L, key_K = torch.arange(longest), torch.arange((chunk + 1) * longest)
        is_real = query_L < size_R1
        query_RL = start_R1 // size + half * size_R1 + torch.where(is_real, query_L, 0)
        key_RK = start_R1 + torch.where(key_K < (chunk + 1) * size_R1, key_K, 0)
        distance_RLK = (chunk * size_R1 + query_L)[..., None] - key_K
        stacks.append(RowStack(query_RL, key_RK, distance_RLK, is_real.flatten().nonzero().flatten()))
    return stacks


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of lengths with the same next power of two, so that padding at most doubles the tokens; none of 0."""
    classes: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        if length:
            classes.setdefault((length - 1).bit_length(), []).append(row)
    return list(classes.values())
