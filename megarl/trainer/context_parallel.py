"""Splits rows over context-parallel ranks in zig-zag order; computes causal attention.

With C context ranks, a row is padded to 2 C chunks of equal length; rank r gets chunks r and
2 C - 1 - r, so every rank scores the same number of query-key pairs:

    row        | 0 | 1 | 2 | 3 |        C = 2
    rank 0     | 0 | 3 |                rank 1     | 1 | 2 |

Megatron's rotary embedding and Transformer Engine's attention split packed rows the same way. The
attention here runs on a CPU: keys and values are gathered, and each chunk of queries attends to the
keys up to itself.

Shapes: P padded positions of all rows end to end, Q = P / C of them on this rank, H query
heads, G key/value heads, D head_dim of query and key, E of value.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megarl.layout import Axis


def row_multiple(context: int) -> int:
    """Returns the number that must divide the padded length of every row."""
    return 1 if context == 1 else 2 * context


def cu_seqlens_of(lengths: Iterable[int]) -> Tensor:
    """Returns [N + 1] int64: the first position of each row, and the end of the last."""
    return torch.tensor([0, *lengths]).cumsum(0)


def local_positions(lengths: Sequence[int], context: Axis) -> Tensor:
    """Returns [Q] int64: which of the P positions of these padded rows are on this rank."""
    parts = [torch.arange(0)]
    for row_L in torch.arange(sum(lengths)).split([*lengths]):
        chunks = row_L.view(row_multiple(context.size), -1)
        parts += [chunks[i] for i in _chunks(context)]
    return torch.cat(parts)


def _chunks(context: Axis) -> tuple[int, ...]:
    """Returns the indices of a row's chunks on this rank; without splitting, a row is one chunk."""
    if context.size == 1:
        return (0,)
    return context.rank, 2 * context.size - 1 - context.rank


# (q [R, H, L, D], k [R, G, K, D], v [R, G, K, E], distances [R, L, K] or None) -> [R, H, L, E]
RowAttention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class RowStack:
    """Chunks of similar length, padded to the longest, for one `RowAttention` call.

    Padding repeats a row's first position.
    """

    query_RL: Tensor  # [R, L] int64: positions of the queries
    key_RK: Tensor  # [R, K] int64: positions of the keys
    # [R, L, K]: how far each key precedes each query; None: q and k are whole rows
    distance_RLK: Tensor | None
    real: Tensor  # [S] int64: indices into the R * L queries of those that are real


def attend(
    query_QHD: Tensor,
    key: Tensor,  # [Q, G, D]
    value: Tensor,  # [Q, G, E]
    lengths: Sequence[int],
    group: dist.ProcessGroup | None,  # the context ranks; None: rows are not split
    score: RowAttention,
) -> Tensor:  # [Q, H * E]
    """Computes causal attention within rows of these padded lengths.

    Gradients flow across the context ranks.
    """
    context = Axis(1)
    if group is not None:
        context = Axis(group.size(), dist.get_rank(group))
        ranks = range(context.size)
        order = torch.cat([local_positions(lengths, Axis(len(ranks), x)) for x in ranks]).argsort()
        gathered = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=group)
        in_order = gathered.index_select(0, order.to(gathered.device))
        key, value = in_order.split([key.shape[-1], value.shape[-1]], -1)
    return attend_stacks(query_QHD, key, value, _stacks(lengths, context), score)


def attend_stacks(
    query_QHD: Tensor,
    key_PGD: Tensor,
    value_PGE: Tensor,
    stacks: Iterable[RowStack],
    score: RowAttention,
) -> Tensor:  # [Q, H * E]
    """Returns the attention outputs of all stacks, in the order of their query positions."""
    device = query_QHD.device
    outputs = []
    positions = []
    for stack in stacks:
        distance_RLK = stack.distance_RLK
        if distance_RLK is not None:
            distance_RLK = distance_RLK.to(device)
        out_RHLE = score(
            _take_rows(query_QHD, stack.query_RL),
            _take_rows(key_PGD, stack.key_RK),
            _take_rows(value_PGE, stack.key_RK),
            distance_RLK,
        )
        own = stack.real.to(device)
        outputs.append(out_RHLE.transpose(1, 2).flatten(0, 1).index_select(0, own))
        positions.append(stack.query_RL.flatten()[stack.real])
    order = torch.cat(positions).argsort().to(device)
    return torch.cat(outputs).index_select(0, order).flatten(1)


def _take_rows(x: Tensor, index_RL: Tensor) -> Tensor:
    """Gathers `x` [positions, heads, D] into [R, heads, L, D]."""
    taken = x.index_select(0, index_RL.flatten().to(x.device))
    return taken.unflatten(0, index_RL.shape).transpose(1, 2)


def shared_stacks(lengths: Sequence[int], slot_P: Tensor, is_own_P: Tensor) -> Iterator[RowStack]:
    """Yields stacks of whole rows with shared prefixes: position p is computed in slot `slot_P[p]`.

    Of the positions that share a slot, the one with `is_own_P` provides the output.
    """
    for stack in _stacks(lengths, Axis(1)):
        real = stack.real[is_own_P[stack.query_RL.flatten()[stack.real]]]
        yield RowStack(slot_P[stack.query_RL], slot_P[stack.key_RK], None, real)


def _stacks(lengths: Sequence[int], context: Axis) -> Iterator[RowStack]:
    """Yields stacks of this rank's chunks of queries, with each row's keys up to its end."""
    start_N = cu_seqlens_of(lengths)[:-1]
    size_N = torch.tensor(lengths) // row_multiple(context.size)
    for index, chunk in enumerate(_chunks(context)):
        for rows in _similar(size_N.tolist()):
            start_R1 = start_N[rows, None]
            size_R1 = size_N[rows, None]
            longest = int(size_R1.max())
            query_L = torch.arange(longest)
            key_K = torch.arange((chunk + 1) * longest)
            is_real = query_L < size_R1
            first_R1 = start_R1 // context.size + index * size_R1
            query_RL = first_R1 + torch.where(is_real, query_L, 0)
            key_RK = start_R1 + torch.where(key_K < (chunk + 1) * size_R1, key_K, 0)
            distance_RLK = None
            if context.size > 1:
                distance_RLK = (chunk * size_R1 + query_L)[..., None] - key_K
            yield RowStack(query_RL, key_RK, distance_RLK, is_real.flatten().nonzero().flatten())


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Groups the indices of nonzero lengths by the next power of two.

    Padding within a group then at most doubles the tokens.
    """
    classes = {}
    for row, length in enumerate(lengths):
        if length:
            classes.setdefault((length - 1).bit_length(), []).append(row)
    return list(classes.values())
