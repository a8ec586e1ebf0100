"""The reference policy: a host copy of each rank's weights, exchanged with the current ones for one forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megarl.trainer.offload import HostBuffer
from megarl.weights.checksum import checksum

EXCHANGED_BYTES = 64 << 20  # on the device at a time


class Reference:
    """A copy of the storages of `parameters`. While it is in use, its buffer has the current weights."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._host = HostBuffer()
        for there, here in self._host.beside(parameters):
            here.copy_(there)

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
        assert torch.equal(torch.stack(before), torch.stack(after)), "the weights changed behind the reference"


@torch.no_grad()
def _exchange(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for there, here in pairs:
        for device, host in zip(there.split(EXCHANGED_BYTES), here.split(EXCHANGED_BYTES), strict=True):
            held = device.clone()
            device.copy_(host, non_blocking=True)
            host.copy_(held, non_blocking=True)
