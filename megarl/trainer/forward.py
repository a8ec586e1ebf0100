"""Micro-batches -> Megatron's schedule -> the head's outputs on the last stage.

    pack(batch, rows) -> Microbatch --get_forward_backward_func--> hidden --head--> on_outputs(rows, outputs)

Outputs are gathered over the context ranks, so a loss sees whole rows on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megarl.trainer.heads import Head, HeadOptions
from megarl.trainer.microbatch import Microbatch, length_of
from megarl.types import MicrobatchRows, TokenOutputs

__all__ = ["OnOutputs", "forward_backward"]

# Called on the last stage with each micro-batch; returns its loss.
OnOutputs = Callable[[MicrobatchRows, TokenOutputs], Tensor]


def forward_backward(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[Microbatch],
    head: Head,
    options: HeadOptions,
    on_outputs: OnOutputs,
    *,
    context: ProcessGroup,
    train: bool,
) -> None:
    """Send the micro-batches through the pipeline; with `train` backward too, gradients summed over data ranks.

    Several chunks (virtual stages) need micro-batches of one length, and a number of them that the pipeline size
    divides.
    """

    def forward_step(data: Iterator[Microbatch], chunk: torch.nn.Module) -> tuple[Tensor, Callable]:
        microbatch = next(data)
        hidden = chunk(
            input_ids=microbatch.tokens,
            position_ids=microbatch.positions,
            attention_mask=None,
            packed_seq_params=microbatch.packed,
        )
        return hidden, partial(loss, microbatch, chunk)

    def loss(microbatch: Microbatch, chunk: torch.nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, dict]:
        model = getattr(chunk, "module", chunk)  # in DistributedDataParallel while training
        value = on_outputs(microbatch.rows, _read(microbatch, hidden, model, head, options, context))
        # Megatron would divide by the token count; the weights of the loss have divided already.
        return value, torch.zeros((), dtype=torch.int, device=hidden.device), {}

    with torch.set_grad_enabled(train):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches) if len(chunks) == 1 else [iter(microbatches) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(microbatches),
            seq_length=max(length_of(microbatch) for microbatch in microbatches),
            micro_batch_size=1,
            forward_only=not train,
        )


def _read(
    microbatch: Microbatch, hidden: Tensor, model: GPTModel, head: Head, options: HeadOptions, context: ProcessGroup
) -> TokenOutputs:
    """Hidden states [Q / tp, 1, hidden] of the last stage -> outputs [M], 0 where the head reads nothing."""
    hidden_QH = hidden.flatten(0, 1)
    if model.config.sequence_parallel:
        hidden_QH = gather_from_sequence_parallel_region(hidden_QH, tensor_parallel_output_grad=head.is_tensor_parallel)
    outputs = head.read(model, hidden_QH.index_select(0, microbatch.read), microbatch.labels, options)
    fields = head.fields(entropy=options.entropy)
    zeros_M = torch.zeros(microbatch.rows.index.numel(), device=hidden.device)
    whole = torch.stack([zeros_M.index_put((microbatch.read_rows,), getattr(outputs, name)) for name in fields])
    if context.size() > 1:
        # Summed forward, copied backward: every context rank has the whole loss, and sends back only its own part.
        whole = reduce_from_tensor_model_parallel_region(whole, group=context)
    return TokenOutputs(**dict(zip(fields, whole, strict=True)))
