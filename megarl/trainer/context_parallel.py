"""Rows split over the context ranks, zig-zag, and causal attention across them.

A row padded to 2 C chunks of one length, C context ranks; rank r holds chunks r and 2 C - 1 - r, so every rank
scores as many pairs of query and key:

    row        | 0 | 1 | 2 | 3 |        C = 2
    rank 0     | 0 | 3 |                rank 1     | 1 | 2 |

Megatron's rotary embedding and Transformer Engine's attention split packed rows the same way. The attention here is
for a CPU: keys and values are gathered, and each chunk of queries sees the keys up to itself.
Shapes: P padded positions of all rows end to end, Q = P / C of them here, H query heads, G key/value heads, D, E.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from megarl.layout import Axis

__all__ = ["attend", "held_positions", "row_multiple"]


def row_multiple(context: int) -> int:
    """What a row's padded length is a multiple of."""
    return 2 * context if context > 1 else 1


def held_positions(lengths: Sequence[int], context: Axis) -> Tensor:
    """[Q] int64: which of the P positions of these padded rows this rank holds, in the order in which it does."""
    if context.size == 1:
        return torch.arange(sum(lengths))
    parts, start = [torch.arange(0)], 0
    for length in lengths:
        chunk = length // (2 * context.size)
        parts += [torch.arange(start + at * chunk, start + (at + 1) * chunk) for at in _chunks(context)]
        start += length
    return torch.cat(parts)


def _chunks(context: Axis) -> tuple[int, int]:
    return context.rank, 2 * context.size - 1 - context.rank


# (q [R, H, L, D], k [R, G, K, D], v [R, G, K, E], how far each key stands before each query [R, L, K]) -> [R, H, L, E]
Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attend(
    query_QHD: Tensor, key_QGD: Tensor, value_QGE: Tensor, lengths: Sequence[int], group: ProcessGroup, score: Score
) -> Tensor:  # [Q, H * E]
    """Causal attention within each of the rows, whose padded lengths are given; differentiable across the ranks."""
    context = Axis(group.size(), dist.get_rank(group))
    held = torch.cat([held_positions(lengths, Axis(context.size, rank)) for rank in range(context.size)])
    order_P = held.argsort().to(key_QGD.device)
    gathered = gather_from_sequence_parallel_region(torch.cat([key_QGD, value_QGE], -1), group=group)
    key_PGD, value_PGE = gathered.index_select(0, order_P).split([key_QGD.shape[-1], value_QGE.shape[-1]], -1)
    parts, places = [], []
    for half, at in enumerate(_chunks(context)):
        for query_RL, key_RK, back_RLK, kept in _like_chunks(lengths, context.size, at, half):
            q, k, v = (
                x.index_select(0, index.flatten().to(x.device)).unflatten(0, index.shape).transpose(1, 2)
                for x, index in ((query_QHD, query_RL), (key_PGD, key_RK), (value_PGE, key_RK))
            )
            out = score(q, k, v, back_RLK.to(q.device))
            parts.append(out.transpose(1, 2).flatten(0, 1).index_select(0, kept.to(out.device)))
            places.append(query_RL.flatten()[kept])
    return torch.cat(parts).index_select(0, torch.cat(places).argsort().to(query_QHD.device)).flatten(1)


def _like_chunks(lengths: Sequence[int], size: int, at: int, half: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Chunk number `at` of rows of like length, stacked: queries [R, L] of Q, keys [R, K] of P, how far each key stands
    before each query [R, L, K], and which of the R * L are no pads. Pads stand behind and repeat the row's first.
    """
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    chunks = torch.tensor(lengths) // (2 * size)
    classes: dict[int, list[int]] = {}
    for row, chunk in enumerate(chunks.tolist()):
        if chunk:
            classes.setdefault((chunk - 1).bit_length(), []).append(row)
    found = []
    for rows in classes.values():
        start_R1, chunk_R1 = starts[rows, None], chunks[rows, None]
        longest = int(chunk_R1.max())
        query_L, key_K = torch.arange(longest), torch.arange((at + 1) * longest)
        is_query = query_L < chunk_R1
        query_RL = start_R1 // size + half * chunk_R1 + torch.where(is_query, query_L, 0)
        key_RK = start_R1 + torch.where(key_K < (at + 1) * chunk_R1, key_K, 0)
        back_RLK = (at * chunk_R1 + query_L)[..., None] - key_K
        found.append((query_RL, key_RK, back_RLK, is_query.flatten().nonzero().flatten()))
    return found
