"""The reference policy: a host copy of each rank's shards, swapped into the parameters for one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Reference:
    """Weights in the training dtype, on the host, by local parameter name."""

    weights: Mapping[str, Tensor]

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> Reference:
        return cls(_copy(parameters))

    @contextmanager
    def in_place_of(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Copies the reference into `parameters`; on exit, restores their previous values bit for bit."""
        current = _copy(parameters)
        before = {name: _checksum(parameter) for name, parameter in parameters.items()}
        try:
            _write(self.weights, parameters)
            yield
        finally:
            _write(current, parameters)
        for name, parameter in parameters.items():
            assert _checksum(parameter) == before[name], f"{name} changed while the reference was swapped in"


def _copy(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters.items()}


def _write(weights: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name])


def _checksum(parameter: Tensor) -> int:
    """Returns the sum of the parameter's bits as integers."""
    bits = parameter.detach().view(torch.int16 if parameter.element_size() == 2 else torch.int32)
    return int(bits.sum(dtype=torch.int64))
