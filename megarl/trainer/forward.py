"""Micro-batches -> Megatron's schedule -> the head's outputs on the last stage -> weighted losses.

    Microbatch --get_forward_backward_func--> hidden --head--> on_outputs(rows, outputs)

Outputs are gathered over the context ranks, so that the loss sees whole rows on each rank.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.nn import Module

from megarl.trainer.heads import Head, HeadOptions
from megarl.trainer.microbatch import Microbatch
from megarl.types import Loss, MicrobatchRows, TokenOutputs
from megarl.weights.sync.transports.values import gather_values


def forward_backward(
    chunks: Sequence[Module],
    microbatches: Sequence[Microbatch],
    head: Head,
    options: HeadOptions,
    # called on the last stage; returns a micro-batch's loss
    on_outputs: Callable[[MicrobatchRows, TokenOutputs], Tensor],
    *,
    train: bool,
) -> None:
    """Runs the micro-batches forward through the pipeline, and with `train` also backward.

    Gradients are summed over data-parallel ranks. Virtual stages (several chunks) need
    micro-batches of equal length, whose number is a multiple of the pipeline size.
    """

    def forward_step(data: Iterator[Microbatch], chunk: Module) -> tuple[Tensor, Callable]:
        microbatch = next(data)
        hidden = chunk(
            input_ids=microbatch.tokens,
            position_ids=microbatch.positions,
            attention_mask=None,
            packed_seq_params=microbatch.packed,
        )
        return hidden, partial(loss, microbatch, chunk)

    def loss(microbatch: Microbatch, chunk: Any, hidden: Tensor) -> tuple[Tensor, Tensor, dict]:
        value = on_outputs(microbatch.rows, _read(microbatch, hidden, chunk.module, head, options))
        # a token count of 0, so that Megatron does not divide the loss, which is already weighted
        return value, torch.zeros((), dtype=torch.int, device=hidden.device), {}

    with torch.set_grad_enabled(train):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(microbatches) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(microbatches),
            seq_length=max(microbatch.length for microbatch in microbatches),
            micro_batch_size=1,
            forward_only=not train,
        )


def _read(
    microbatch: Microbatch,
    hidden: Tensor,
    model: GPTModel,
    head: Head,
    options: HeadOptions,
) -> TokenOutputs:
    """Applies the head to the last stage's hidden states [Q / tp, 1, hidden]; returns outputs [M].

    Outputs are 0 at positions that the head does not read.
    """
    hidden_QH = hidden.flatten(0, 1)
    if model.config.sequence_parallel:
        hidden_QH = gather_from_sequence_parallel_region(
            hidden_QH, tensor_parallel_output_grad=head.is_tensor_parallel
        )
    hidden_SH = hidden_QH.index_select(0, microbatch.read)
    outputs = head.read(model, hidden_SH, microbatch.labels, options)
    whole = {}
    for name, x_S in outputs.tensors().items():
        zeros_M = x_S.new_zeros(len(microbatch.rows.index), *x_S.shape[1:])
        x_M = zeros_M.index_put((microbatch.read_rows,), x_S)
        # Sum in forward, copy in backward: context ranks have the whole loss, but backpropagate
        # only their own part.
        whole[name] = reduce_from_tensor_model_parallel_region(x_M, group=options.groups.context)
    return replace(outputs, **whole)


@dataclass(frozen=True)
class LossSums:
    """Weights the loss of each micro-batch, and accumulates the sums to report.

    The last stage calls it with each micro-batch's outputs; it returns the weighted loss and adds
    to `totals`.
    """

    loss: Loss
    weights_T: Tensor  # [T] fp64: each token's weight in the loss
    # name -> 0-d fp64, summed over this rank's micro-batches; empty on other stages
    totals: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, rows: MicrobatchRows, outputs: TokenOutputs) -> Tensor:
        losses = self.loss(outputs, rows)
        weights_M = rows.select(self.weights_T)
        # fp64: at the first update a loss is a sum of advantages that nearly cancel
        value = (losses.loss.detach().double() * weights_M).sum()
        for name, total in {**losses.sums, "loss": value, "count": losses.count}.items():
            self.totals[name] = total.detach().double() + self.totals.get(name, 0.0)
        return (losses.loss * weights_M.to(losses.loss.dtype)).sum()


def global_sums(sums: Mapping[str, Tensor], *, counts: bool) -> dict[str, float]:
    """Adds up the sums of the ranks where `counts` is True; returns the totals on every rank.

    Of ranks that have the same rows, only one may count.
    """
    own = {}
    if counts:
        own = dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True))
    totals = Counter()
    for values in gather_values(own):
        totals.update(values)
    return dict(sorted(totals.items()))
