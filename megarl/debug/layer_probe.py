"""Records the output of each transformer layer, independent of the layout: eight fixed projections of every token.

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

from megarl.trainer.trainer import Trainer
from megarl.types import TokenBatch

NUM_PROJECTIONS = 8


@contextmanager
def probe_layers(trainer: Trainer, batch: TokenBatch) -> Iterator[Tensor]:
    """A context manager for one call of `trainer.forward(batch)`.

    Yields [layers, T, 8] fp64 on the CPU, filled when the context exits, the same on every rank.
    """
    projected_T8 = torch.zeros(trainer.shape.layers, batch.num_tokens, NUM_PROJECTIONS, dtype=torch.float64)
    random, hidden_size = torch.Generator().manual_seed(0), trainer.shape.hidden
    projection_H8 = torch.randn(hidden_size, NUM_PROJECTIONS, generator=random, dtype=torch.float64)
    projection_H8 /= hidden_size**0.5
    microbatches = trainer.microbatches(batch)

    def attach_hook(layer: TransformerLayer) -> torch.utils.hooks.RemovableHandle:
        remaining = iter(microbatches)

        def hook(_module: torch.nn.Module, _inputs: object, outputs: tuple[Tensor, ...]) -> None:
            hidden_QH = outputs[0].detach().flatten(0, 1)
            if layer.config.sequence_parallel:
                hidden_QH = gather_from_sequence_parallel_region(hidden_QH, tensor_parallel_output_grad=False)
            if trainer.layout.tp.first:
                microbatch, values_Q8 = next(remaining), hidden_QH.cpu().double() @ projection_H8
                is_real = microbatch.source >= 0
                index = microbatch.rows.index[microbatch.source[is_real]]
                projected_T8[layer.layer_number - 1, index] = values_Q8[is_real]

        return layer.register_forward_hook(hook)

    layers = [module for chunk in trainer.model for module in chunk.modules() if isinstance(module, TransformerLayer)]
    hooks = [attach_hook(layer) for layer in layers]
    try:
        yield projected_T8
    finally:
        for hook in hooks:
            hook.remove()
    total = projected_T8.to(trainer.device)
    dist.all_reduce(total)
    projected_T8.copy_(total)
