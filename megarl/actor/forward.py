"""Rows of a batch -> packed micro-batches -> Megatron's schedule -> log-probs of the labels, on the last stage.

    pack(batch, rows)  ->  Microbatch (on the device)  --get_forward_backward_func-->  on_outputs(microbatch, outputs)

A micro-batch is its rows end to end, each padded to what context parallelism splits, and behind them one dummy row to
what sequence parallelism divides. M real positions, P >= M with all padding, of which a context rank holds Q = P / C
(actor/context.py); S of the Q have a label to learn (mask True). Only those S reach the vocabulary: prompts cost no
logits. What they give is gathered over the context ranks, so a loss sees whole rows on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.nn.functional import pad

from megarl.actor.build import Groups, output_weight
from megarl.actor.context import held_positions, row_multiple
from megarl.actor.logprobs import TokenOutputs, VocabShard, token_outputs
from megarl.layout import Axis
from megarl.types import TrainBatch

__all__ = ["Microbatch", "Reading", "pack", "run"]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Whole rows, or this context rank's chunks of them, on the device, ready for the model."""

    tokens: Tensor  # [1, Q] int64
    positions: Tensor  # [1, Q] int64, from 0 in each row
    packed: PackedSeqParams  # rows and the dummy row, as padded, on all context ranks together
    source: Tensor  # [Q] int64, on the CPU: which of the M positions, -1 for padding
    rows: tuple[int, ...]  # of the batch
    index: Tensor  # [M] int64, on the CPU: where each real position lies in the batch
    cu_seqlens: Tensor  # [rows + 1] int64, real rows only
    mask: Tensor  # [M] bool
    chosen: Tensor  # [S] int64: positions of Q where the mask is True
    places: Tensor  # [S] int64: the same positions of M
    labels: Tensor  # [S] int64


@dataclass(frozen=True, slots=True)
class Reading:
    """How hidden states are read: the same for every micro-batch of a pass."""

    groups: Groups
    vocab: int
    temperature: float
    chunk: int  # tokens whose fp32 logits exist at once
    entropy: bool


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
        packed=_rows(padded, device),
        source=source,
        rows=tuple(rows),
        index=index,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(device),
        mask=mask.to(device),
        chosen=chosen.to(device),
        places=places.to(device),
        labels=batch.labels[index][places].to(device),
    )


def _rows(lengths: Sequence[int], device: torch.device) -> PackedSeqParams:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def _padded(microbatch: Microbatch, length: int) -> Microbatch:
    """With one more dummy row, up to `length` of the P positions."""
    more = length - _length(microbatch)
    if not more:
        return microbatch
    lengths, held = microbatch.packed.cu_seqlens_q.diff().tolist(), microbatch.tokens.shape[1]
    here = more * held // _length(microbatch)
    return replace(
        microbatch,
        tokens=pad(microbatch.tokens, (0, here)),
        positions=pad(microbatch.positions, (0, here)),
        source=pad(microbatch.source, (0, here), value=-1),
        packed=_rows([*lengths, more], microbatch.tokens.device),
    )


def _length(microbatch: Microbatch) -> int:
    """P."""
    return int(microbatch.packed.cu_seqlens_q[-1])


# (micro-batch, outputs) -> the loss of the micro-batch; what else it learns it keeps. Called on the last stage.
OnOutputs = Callable[[Microbatch, TokenOutputs], Tensor]


def run(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[Microbatch],
    reading: Reading,
    on_outputs: OnOutputs,
    *,
    train: bool,
) -> None:
    """Send the micro-batches through the pipeline; with `train` backward too, gradients summed over data ranks.

    Several chunks (virtual stages) need as many micro-batches as the pipeline has ranks, or a multiple.
    """
    longest = max(_length(microbatch) for microbatch in microbatches)
    if len(chunks) > 1:
        microbatches = [_padded(microbatch, longest) for microbatch in microbatches]

    def step(data: Iterator[Microbatch], chunk: torch.nn.Module) -> tuple[Tensor, Callable]:
        microbatch = next(data)
        hidden = chunk(
            input_ids=microbatch.tokens,
            position_ids=microbatch.positions,
            attention_mask=None,
            packed_seq_params=microbatch.packed,
        )
        return hidden, partial(loss, microbatch, chunk)

    def loss(microbatch: Microbatch, chunk: torch.nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, dict]:
        outputs = _read(microbatch, hidden, _unwrapped(chunk), reading)
        value = on_outputs(microbatch, outputs)
        # The token count would be a divisor; weights_T have divided already.
        return value, torch.zeros((), dtype=torch.int, device=hidden.device), {}

    with torch.set_grad_enabled(train):
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(microbatches) if len(chunks) == 1 else [iter(microbatches) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(microbatches),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=not train,
        )


def _unwrapped(chunk: torch.nn.Module) -> GPTModel:
    model = getattr(chunk, "module", chunk)
    assert isinstance(model, GPTModel)
    return model


def _read(microbatch: Microbatch, hidden: Tensor, model: GPTModel, reading: Reading) -> TokenOutputs:
    """[1, Q / tp, hidden] of the last stage -> outputs [M], 0 where the mask is False."""
    hidden_QH = hidden.flatten(0, 1)
    if model.config.sequence_parallel:
        hidden_QH = gather_from_sequence_parallel_region(hidden_QH, tensor_parallel_output_grad=True)
    weight_VH = output_weight(model)
    read = token_outputs(
        hidden_QH.index_select(0, microbatch.chosen),
        weight_VH,
        microbatch.labels,
        VocabShard.of(reading.vocab, weight_VH.shape[0], reading.groups.tensor),
        temperature=reading.temperature,
        chunk=reading.chunk,
        entropy=reading.entropy,
    )
    found = [read.logprobs_T] if read.entropy_T is None else [read.logprobs_T, read.entropy_T]
    zeros_M = torch.zeros(microbatch.index.numel(), device=hidden.device)
    whole = torch.stack([zeros_M.index_put((microbatch.places,), x_S) for x_S in found])
    if reading.groups.context.size() > 1:
        # Summed forward, copied backward: every context rank has the whole loss, and sends back only what it holds.
        whole = reduce_from_tensor_model_parallel_region(whole, group=reading.groups.context)
    return TokenOutputs(whole[0], None if read.entropy_T is None else whole[1])
