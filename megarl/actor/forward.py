"""Rows of a batch -> packed micro-batches -> Megatron's schedule -> log-probs of the labels, on the last stage.

    pack(batch, rows)  ->  Microbatch (on the device)  --get_forward_backward_func-->  on_outputs(microbatch, outputs)

A micro-batch is its rows end to end, padded behind with one dummy row to what sequence parallelism divides.
M real positions, P >= M with the dummy row, S positions with a label to learn (mask True). Only those S reach
the vocabulary: prompts cost no logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from megarl.actor.build import output_weight
from megarl.actor.logprobs import TokenOutputs, VocabShard, token_outputs
from megarl.types import TrainBatch

__all__ = ["Microbatch", "Reading", "pack", "run"]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Whole rows on the device, ready for the model; `index` says where each real position lies in the batch."""

    tokens: Tensor  # [1, P] int64
    positions: Tensor  # [1, P] int64, from 0 in each row
    packed: PackedSeqParams  # rows and the dummy row
    index: Tensor  # [M] int64, on the CPU
    cu_seqlens: Tensor  # [rows + 1] int64, real rows only
    mask: Tensor  # [M] bool
    chosen: Tensor  # [S] int64: positions where the mask is True
    labels: Tensor  # [S] int64


@dataclass(frozen=True, slots=True)
class Reading:
    """How hidden states are read: the same for every micro-batch of a pass."""

    tensor_group: ProcessGroup
    vocab: int
    temperature: float
    chunk: int  # tokens whose fp32 logits exist at once
    entropy: bool


def pack(batch: TrainBatch, rows: Sequence[int], *, multiple: int, device: torch.device) -> Microbatch:
    """The micro-batch of `rows`; with no rows it is the dummy row alone."""
    spans = [(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])) for row in rows]
    lengths = [end - start for start, end in spans]
    index = torch.cat([torch.arange(start, end) for start, end in spans] or [torch.arange(0)])
    num_real = index.numel()
    num_dummy = -num_real % multiple if num_real else multiple
    padded = [*lengths, num_dummy] if num_dummy else lengths
    mask = batch.mask[index]
    chosen = mask.nonzero().flatten()
    return Microbatch(
        tokens=torch.cat([batch.tokens[index], index.new_zeros(num_dummy)])[None].to(device),
        positions=torch.cat([torch.arange(length) for length in padded])[None].to(device),
        packed=_rows(padded, device),
        index=index,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(device),
        mask=mask.to(device),
        chosen=chosen.to(device),
        labels=batch.labels[index][chosen].to(device),
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
    """With one more dummy row, up to `length` positions."""
    more = length - microbatch.tokens.shape[1]
    if not more:
        return microbatch
    lengths = microbatch.packed.cu_seqlens_q.diff().tolist()
    return replace(
        microbatch,
        tokens=pad(microbatch.tokens, (0, more)),
        positions=torch.cat([microbatch.positions, torch.arange(more, device=microbatch.positions.device)[None]], 1),
        packed=_rows([*lengths, more], microbatch.tokens.device),
    )


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
    longest = max(microbatch.tokens.shape[1] for microbatch in microbatches)
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
    """[1, P / tp, hidden] of the last stage -> outputs [M], 0 where the mask is False."""
    hidden_PH = hidden.flatten(0, 1)
    if model.config.sequence_parallel:
        hidden_PH = gather_from_sequence_parallel_region(hidden_PH, tensor_parallel_output_grad=True)
    weight_VH = output_weight(model)
    read = token_outputs(
        hidden_PH.index_select(0, microbatch.chosen),
        weight_VH,
        microbatch.labels,
        VocabShard.of(reading.vocab, weight_VH.shape[0], reading.tensor_group),
        temperature=reading.temperature,
        chunk=reading.chunk,
        entropy=reading.entropy,
    )
    zeros_M = torch.zeros(microbatch.index.numel(), device=hidden.device)
    return TokenOutputs(
        zeros_M.index_put((microbatch.chosen,), read.logprobs_T),
        None if read.entropy_T is None else zeros_M.index_put((microbatch.chosen,), read.entropy_T),
    )
