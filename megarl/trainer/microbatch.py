"""Rows of a batch end to end, as one input of the model; under context parallelism, this rank's chunks of them.

Each row is padded to what context parallelism splits (context_parallel.py), and one dummy row follows, up to what
sequence parallelism divides. M real positions, P >= M with all padding, Q = P / C of them on each of C context
ranks, S of the Q with a label to learn (mask True).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import pad

from megarl.layout import Axis
from megarl.trainer.context_parallel import held_positions, row_multiple
from megarl.types import TrainBatch

__all__ = ["Microbatch", "extended", "length_of", "pack"]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Replicated rows, or this context rank's chunks of them, on the device, ready for the model."""

    tokens: Tensor  # [1, Q] int64
    positions: Tensor  # [1, Q] int64, from 0 in each row
    packed: PackedSeqParams  # rows and the dummy row, as padded, on all context ranks together
    source: Tensor  # [Q] int64, on the CPU: which of the M positions, -1 for padding
    index: Tensor  # [M] int64, on the CPU: where each real position lies in the batch
    cu_seqlens: Tensor  # [rows + 1] int64, real rows only
    mask: Tensor  # [M] bool
    chosen: Tensor  # [S] int64: positions of Q where the mask is True
    places: Tensor  # [S] int64: the same positions of M
    labels: Tensor  # [S] int64


def pack(batch: TrainBatch, rows: Sequence[int], *, tensor: int, context: Axis, device: torch.device) -> Microbatch:
    """The micro-batch of `rows`; with no rows it is the dummy row alone."""
    spans = [(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])) for row in rows]
    lengths = [end - start for start, end in spans]
    index = torch.cat([torch.arange(start, end) for start, end in spans] or [torch.arange(0)])
    multiple = row_multiple(context.size)
    padded = [length + -length % multiple for length in lengths]
    if num_dummy := -sum(padded) % (tensor * multiple) if rows else tensor * multiple:
        padded.append(num_dummy)
    position_P = torch.cat([torch.arange(length) for length in padded])
    is_real_P = torch.cat([torch.arange(p) < n for p, n in zip(padded, [*lengths, 0], strict=False)])
    source_P = torch.where(is_real_P, is_real_P.cumsum(0) - 1, -1)
    held = held_positions(padded, context)
    source, mask = source_P[held], batch.mask[index]
    is_real = source >= 0
    chosen = is_real.index_put((is_real,), mask[source[is_real]]).nonzero().flatten()
    places = source[chosen]
    tokens = torch.zeros_like(source).index_put((is_real,), batch.tokens[index][source[is_real]])
    return Microbatch(
        tokens=tokens[None].to(device),
        positions=position_P[held][None].to(device),
        packed=_rows(padded, context.size, device),
        source=source,
        index=index,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(device),
        mask=mask.to(device),
        chosen=chosen.to(device),
        places=places.to(device),
        labels=batch.labels[index][places].to(device),
    )


def _rows(lengths: Sequence[int], context: int, device: torch.device) -> PackedSeqParams:
    """A row's padding stands behind it, so causality keeps it out. Transformer Engine splits rows by `..._padded`."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
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


def extended(microbatch: Microbatch, length: int) -> Microbatch:
    """With one more dummy row, up to `length` of the P positions."""
    more = length - length_of(microbatch)
    if not more:
        return microbatch
    lengths, held = microbatch.packed.cu_seqlens_q.diff().tolist(), microbatch.tokens.shape[1]
    context = length_of(microbatch) // held
    here = more // context
    return replace(
        microbatch,
        tokens=pad(microbatch.tokens, (0, here)),
        positions=pad(microbatch.positions, (0, here)),
        source=pad(microbatch.source, (0, here), value=-1),
        packed=_rows([*lengths, more], context, microbatch.tokens.device),
    )


def length_of(microbatch: Microbatch) -> int:
    """P."""
    return int(microbatch.packed.cu_seqlens_q[-1])
