"""The reference policy: a host copy of each rank's weights, exchanged with the current ones for one forward pass.
Another model, as the reference or a teacher, is a trainer of its own that is never updated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.trainer.lora import Adapters
from megarl.trainer.offload import HostBuffer, Memory
from megarl.trainer.trainer import Trainer
from megarl.types import TokenBatch, TokenOutputs
from megarl.weights.checksum import checksum

EXCHANGED_BYTES = 64 << 20  # on the device at a time


def reference_of(trainer: Trainer) -> Reference | FrozenBase:
    """Returns the current policy as the reference; with LoRA the base model, which needs no copy."""
    if trainer.adapters is not None:
        return FrozenBase(trainer.adapters, is_policy=trainer.adapters.lora.path is None)
    return Reference(trainer.parameters_by_name().values())


@dataclass
class FrozenBase:
    """Reference, of a model with adapters: while it is in use, they are off."""

    adapters: Adapters
    is_policy: bool  # before the first update from B = 0

    def in_place_of(self, _parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        return self.adapters.off()


class Reference:
    """A copy of the storages of `parameters`. While it is in use, its buffer has the current weights."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._host = HostBuffer()
        self.reset(parameters)
        self.is_policy = False  # a checkpoint may be loaded now

    @torch.no_grad()
    def reset(self, parameters: Iterable[Tensor]) -> None:
        """Copies the current weights, bit for bit; `is_policy` is then True until the first update."""
        for there, here in self._host.beside(parameters):
            here.copy_(there)
        self.is_policy = True

    @contextmanager
    def in_place_of(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Exchanges the reference for `parameters`; on exit, restores their values, verified by a checksum."""
        pairs = self._host.beside(parameters)
        before = [checksum(there) for there, _ in pairs]
        _exchange(pairs)
        try:
            yield
        finally:
            _exchange(pairs)
        after = [checksum(there) for there, _ in pairs]
        assert torch.equal(torch.stack(before), torch.stack(after)), (
            "the weights changed behind the reference"
        )


@torch.no_grad()
def _exchange(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for there, here in pairs:
        for device, host in zip(
            there.split(EXCHANGED_BYTES), here.split(EXCHANGED_BYTES), strict=True
        ):
            held = device.clone()
            device.copy_(host, non_blocking=True)
            host.copy_(held, non_blocking=True)


def forward_in_turn(
    frozen: Trainer, trained: Memory, batch: TokenBatch, *, top_k: int = 0
) -> TokenOutputs:
    """Returns what Trainer.forward does for `frozen`, which was built beside the trained model and offloads everything;
    meanwhile that one is offloaded as it is set to. Every rank must call it."""
    trained.offload_all()
    frozen.memory.onload_weights()
    outputs = frozen.forward(batch, top_k=top_k)
    frozen.memory.offload_all()
    trained.onload_weights()
    return outputs
