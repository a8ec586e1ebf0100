"""Micro-batches -> Megatron's schedule -> log-probs of the labels, on the last stage.

    pack(batch, rows)  ->  Microbatch (on the device)  --get_forward_backward_func-->  on_outputs(microbatch, outputs)

Of the positions of a micro-batch (actor/microbatch.py) only those with a label to learn reach the vocabulary: prompts
cost no logits. What they give is gathered over the context ranks, so a loss sees whole rows on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from megarl.trainer.logprobs import TokenOutputs, VocabShard, token_outputs
from megarl.trainer.microbatch import Microbatch, length_of
from megarl.trainer.model import Groups, output_weight

__all__ = ["HeadOptions", "run"]


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """How hidden states are read: the same for every micro-batch of a pass."""

    groups: Groups
    vocab: int
    temperature: float
    chunk: int  # tokens whose fp32 logits exist at once
    entropy: bool


# (micro-batch, outputs) -> the loss of the micro-batch; what else it learns it keeps. Called on the last stage.
OnOutputs = Callable[[Microbatch, TokenOutputs], Tensor]


def run(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[Microbatch],
    reading: HeadOptions,
    on_outputs: OnOutputs,
    *,
    train: bool,
) -> None:
    """Send the micro-batches through the pipeline; with `train` backward too, gradients summed over data ranks.

    Several chunks (virtual stages) need micro-batches of one length, and as many as the pipeline has ranks, or a
    multiple.
    """

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
            seq_length=max(length_of(microbatch) for microbatch in microbatches),
            micro_batch_size=1,
            forward_only=not train,
        )


def _unwrapped(chunk: torch.nn.Module) -> GPTModel:
    model = getattr(chunk, "module", chunk)
    assert isinstance(model, GPTModel)
    return model


def _read(microbatch: Microbatch, hidden: Tensor, model: GPTModel, reading: HeadOptions) -> TokenOutputs:
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
