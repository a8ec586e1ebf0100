"""What each transformer layer gives, in a form that no layout changes: eight fixed projections of every token.

layer of a stage --hook--> [Q / tp, H] --gather tp, project--> [Q, 8] --scatter by batch position--> [layers, T, 8]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.trainer.microbatch import Microbatch
from megarl.trainer.trainer import Actor
from megarl.types import TrainBatch

__all__ = ["probe_layers"]

NUM = 8  # projections


@contextmanager
def probe_layers(actor: Actor, batch: TrainBatch) -> Iterator[Tensor]:
    """Around one `actor.logprobs(batch)` without a reference: afterwards the tensor yielded is filled, [layers, T, 8]
    fp64 on the CPU, the same on every rank."""
    found = torch.zeros(actor.shape.layers, batch.num_tokens, NUM, dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    onto_H8 = torch.randn(actor.shape.hidden, NUM, generator=random, dtype=torch.float64) / actor.shape.hidden**0.5
    microbatches = actor.microbatches(batch)

    def watch(layer: TransformerLayer) -> torch.utils.hooks.RemovableHandle:
        order = iter(microbatches)

        def hook(_module: torch.nn.Module, _inputs: object, outputs: tuple[Tensor, ...]) -> None:
            hidden_QH = outputs[0].detach().flatten(0, 1)
            if layer.config.sequence_parallel:
                hidden_QH = gather_from_sequence_parallel_region(hidden_QH, tensor_parallel_output_grad=False)
            if actor.layout.tp.first:
                _place(found[layer.layer_number - 1], next(order), hidden_QH.cpu().double() @ onto_H8)

        return layer.register_forward_hook(hook)

    layers = [module for chunk in actor.model for module in chunk.modules() if isinstance(module, TransformerLayer)]
    hooks = [watch(layer) for layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    total = found.to(actor.device)
    dist.all_reduce(total)
    found.copy_(total)


def _place(into_T8: Tensor, microbatch: Microbatch, values_Q8: Tensor) -> None:
    is_real = microbatch.source >= 0
    into_T8[microbatch.index[microbatch.source[is_real]]] = values_Q8[is_real]
