"""Packs rows of a batch end to end into one model input.

With context parallelism, the input has only this rank's chunks of the rows. With shared prefixes,
tokens with which several rows begin (for example, a group's prompt) are computed once. Each row is
padded so that context parallelism can split it (context_parallel.py), and a dummy row is appended
so that sequence parallelism can split the total.

M real positions, P >= M including all padding, Q = P / C of them on each of C context ranks, S of
those Q read by the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from megarl.layout import Axis
from megarl.platform.device import to_device
from megarl.trainer.context_parallel import (
    RowStack,
    cu_seqlens_of,
    local_positions,
    row_multiple,
    shared_stacks,
)
from megarl.types import MicrobatchRows, TokenBatch


@dataclass(frozen=True)
class Microbatch:
    """Model input on the device: whole rows, or this context rank's chunks of them."""

    tokens: Tensor  # [1, Q] int64
    positions: Tensor  # [1, Q] int64, from 0 in each row
    packed: PackedSeqParams  # padded rows and the dummy row, over all context ranks
    source: Tensor  # [Q] int64, on the CPU: index into the M positions; -1: padding
    lengths: tuple[int, ...]  # lengths of the real rows, without padding
    length: int  # P, over all context ranks
    rows: MicrobatchRows  # real rows only
    read: Tensor  # [S] int64: indices into Q of the positions that the head reads
    read_rows: Tensor  # [S] int64: indices into M of the same positions
    labels: Tensor  # [S] int64, or [S, 1 + K] with the batch's extra labels

    def local_source(self, tensor: Axis) -> Tensor:
        """Returns [N] int64: the part of `source` that sequence parallelism gives a tensor rank."""
        return self.source.chunk(tensor.size)[tensor.rank]


@dataclass
class SharedRows(PackedSeqParams):
    """Packed rows with shared prefixes: one row for Megatron; `stacks` has the real rows.

    Rotary embeddings must use position ids (rope.py).
    """

    stacks: Sequence[RowStack] = ()


def pack(
    batch: TokenBatch,
    rows: Sequence[int],
    is_read_T: Tensor,
    *,
    tensor: int,
    context: Axis,
    device: torch.device,
    share: bool = False,  # compute shared prefixes once; only without context parallelism
    length: int = 0,  # P; 0: the smallest possible
) -> Microbatch:
    """Packs `rows`, if any, and the dummy row; the head reads where `is_read_T` [T] is true."""
    lengths_R = batch.lengths_N[[*rows]]
    lengths = lengths_R.tolist()
    index = batch.cu_seqlens[[*rows]].repeat_interleave(lengths_R) + _places(lengths)
    batch_tokens = batch.tokens[index]
    multiple = row_multiple(context.size)
    padded = [length + -length % multiple for length in lengths]
    first_P = _first_positions(batch_tokens.split(lengths)) if share else torch.arange(sum(padded))
    num_own = len(first_P.unique())
    unit = tensor * multiple
    num_dummy = max(length or unit, num_own + -num_own % unit) - num_own
    if num_dummy:
        padded.append(num_dummy)
        first_P = torch.cat([first_P, torch.arange(len(first_P), sum(padded))])
    position_P = _places(padded)
    real_lengths = torch.tensor([*lengths, 0][: len(padded)])
    is_real_P = position_P < real_lengths.repeat_interleave(torch.tensor(padded))
    source_P = torch.where(is_real_P, is_real_P.cumsum(0) - 1, -1)
    is_own_P = first_P == torch.arange(len(first_P))
    local_Q = local_positions(padded, context)
    local_Q = local_Q[is_own_P[local_Q]]
    slot_P = torch.full_like(first_P, -1).index_put((local_Q,), torch.arange(len(local_Q)))[first_P]
    packed = _rows(padded, context.size, device)
    if share:
        packed = _shared(padded, slot_P, is_own_P, device)
    source = source_P[local_Q]
    # the source of padding is -1, the element that `pad` appends
    tokens = pad(batch_tokens, (0, 1))[source]
    is_read_P = (slot_P >= 0) & pad(is_read_T[index], (0, 1))[source_P]
    read_rows = source_P[is_read_P]
    labels = batch.labels[index][read_rows]
    if batch.extra_labels is not None:
        labels = torch.cat([labels[:, None], batch.extra_labels[index][read_rows]], 1)
    cu_seqlens = to_device(cu_seqlens_of(lengths), device)
    return Microbatch(
        tokens=to_device(tokens[None], device),
        positions=to_device(position_P[local_Q][None], device),
        packed=packed,
        source=source,
        lengths=tuple(lengths),
        length=len(local_Q) * context.size,
        rows=MicrobatchRows(tuple(rows), index, cu_seqlens, to_device(batch.mask[index], device)),
        read=to_device(slot_P[is_read_P], device),
        read_rows=to_device(read_rows, device),
        labels=to_device(labels, device),
    )


def _places(lengths: Sequence[int]) -> Tensor:
    """Returns [P] int64: each position's index in its row, for rows of these lengths end to end."""
    return torch.cat([torch.arange(length) for length in (0, *lengths)])


def _first_positions(rows: Sequence[Tensor]) -> Tensor:
    """Returns [P] int64: for each position of `rows`, end to end, the position that computes it.

    Positions of rows that agree up to there share the one of the first row in lexical order.
    """
    if not rows:
        return torch.arange(0)
    order = sorted(range(len(rows)), key=[row.tolist() for row in rows].__getitem__)
    tokens_RL = pad_sequence([rows[row] for row in order], batch_first=True, padding_value=-1)
    is_real_RL = tokens_RL >= 0
    is_same_RL = pad(tokens_RL[1:] == tokens_RL[:-1], (0, 0, 1, 0)).cumprod(1).bool()
    first_RL = torch.where(is_same_RL, 0, torch.arange(len(rows))[:, None]).cummax(0).values
    position_RL = cu_seqlens_of(map(len, rows))[order, None] + torch.arange(tokens_RL.shape[1])
    position_P = position_RL[is_real_RL]
    first_P = position_RL.gather(0, first_RL)[is_real_RL]
    return torch.empty_like(position_P).index_put((position_P,), first_P)


def _shared(
    lengths: Sequence[int], slot_P: Tensor, is_own_P: Tensor, device: torch.device
) -> SharedRows:
    whole = _rows([int(is_own_P.sum())], 1, device)
    whole.max_seqlen_q = whole.max_seqlen_kv = max(lengths)
    return SharedRows(**vars(whole), stacks=list(shared_stacks(lengths, slot_P, is_own_P)))


def _rows(lengths: Sequence[int], context: int, device: torch.device) -> PackedSeqParams:
    """Returns Megatron's description of rows with these padded lengths.

    Padding comes last, hidden by the causal mask. Transformer Engine splits rows by
    `cu_seqlens_*_padded`.
    """
    cu_seqlens = to_device(cu_seqlens_of(lengths).int(), device)
    padded: Any = cu_seqlens if context > 1 else None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
