"""Plants rounding errors in the trainer's forward pass, to measure what two correct implementations may differ by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn


@contextmanager
def rounding_errors(chunks: Sequence[nn.Module], eps: float, *, seed: int) -> Iterator[None]:
    """Multiplies the output of each attention, each MLP and the final norm by 1 + u, u uniform in [-eps, eps].

    Repeating a forward pass measures nothing: on a CPU it is bit-equal.
    """
    random: dict[torch.device, torch.Generator] = {}

    def plant(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        x, *rest = output if isinstance(output, tuple) else (output,)
        generator = random.setdefault(x.device, torch.Generator(x.device).manual_seed(seed))
        u = torch.empty(x.shape, dtype=torch.float32, device=x.device).uniform_(-eps, eps, generator=generator)
        planted: Tensor = (x.float() * (1 + u)).to(x.dtype)
        return (planted, *rest) if isinstance(output, tuple) else planted

    places: list[Any] = []
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, TransformerLayer):
                places += [module.self_attention, module.mlp]
            elif name.endswith("final_layernorm"):
                places.append(module)
    handles = [place.register_forward_hook(plant) for place in places]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
