"""The reference policy: a host copy of each rank's weights, swapped in for one forward pass.

If the reference or a teacher is another model, it is a second trainer that is never updated.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.trainer.lora import Adapters
from megarl.trainer.offload import HostBuffer, Memory
from megarl.trainer.optimizer import LrSchedule
from megarl.trainer.trainer import Trainer
from megarl.types import TokenBatch, TokenOutputs
from megarl.weights.sync.checksum import checksum

EXCHANGED_BYTES = 64 << 20  # additional device memory while weights are exchanged


def reference_of(trainer: Trainer) -> "Reference | FrozenBase":
    """Returns the current policy as the reference; with LoRA, the base model without a copy."""
    if trainer.adapters:
        return FrozenBase(trainer.adapters, trainer.scheduler)
    return Reference(trainer.parameters_by_name)


@dataclass
class FrozenBase:
    """The reference of a model with LoRA: the base model, with adapters off."""

    adapters: Adapters
    scheduler: LrSchedule

    @property
    def is_policy(self) -> bool:
        """True before the first update of a run that begins with B = 0."""
        return not (self.scheduler.step or self.adapters.lora.path)

    def in_use(self) -> AbstractContextManager[None]:
        return self.adapters.off()


class Reference:
    """A host copy of the storages of `parameters()`, swapped with the weights while in use."""

    def __init__(self, parameters: Callable[[], Mapping[str, Tensor]]) -> None:
        self._parameters = parameters
        self._host = HostBuffer()
        self.reset()
        self.is_policy = False  # a checkpoint may be loaded next, which changes the policy

    @torch.no_grad()
    def reset(self) -> None:
        """Copies the current weights, bit for bit; `is_policy` is True until the first update."""
        for there, here in self._host.with_storages(self._parameters().values()):
            here.copy_(there)
        self.is_policy = True

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context: swaps the reference in; on exit, restores the weights and verifies checksums."""
        pairs = self._host.with_storages(self._parameters().values())
        before = torch.stack([checksum(there) for there, _ in pairs])
        _exchange(pairs)
        try:
            yield
        finally:
            _exchange(pairs)
        after = torch.stack([checksum(there) for there, _ in pairs])
        assert torch.equal(before, after), "the weights changed behind the reference"


@torch.no_grad()
def _exchange(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for there, here in pairs:
        parts = zip(there.split(EXCHANGED_BYTES), here.split(EXCHANGED_BYTES), strict=True)
        for device, host in parts:
            held = device.clone()
            device.copy_(host, non_blocking=True)
            host.copy_(held, non_blocking=True)


def forward_in_turn(
    frozen: Trainer, trained: Memory, batch: TokenBatch, *, top_k: int
) -> TokenOutputs:
    """Returns the outputs of `frozen` for a batch, while the trained model is offloaded.

    `frozen` shares process groups with the trained model, and is offloaded afterwards. Each model
    offloads what its `train.offload` names. Every rank must call it.
    """
    trained.offload_all()
    frozen.memory.onload_weights()
    outputs = frozen.forward(batch, top_k=top_k)
    frozen.memory.offload_all()
    trained.onload_weights()
    return outputs
