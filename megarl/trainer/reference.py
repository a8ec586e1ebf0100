"""The reference policy: a host copy of each rank's own shards, lent the parameters' memory for one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Reference"]


@dataclass(frozen=True, slots=True)
class Reference:
    """Weights in the training dtype, on the host, by local parameter name."""

    weights: Mapping[str, Tensor]

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> Reference:
        return cls(_copy(parameters))

    @contextmanager
    def in_place_of(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Within, `parameters` hold the reference; afterwards the very bits they held before."""
        current = _copy(parameters)
        before = {name: _digest(parameter) for name, parameter in parameters.items()}
        try:
            _write(self.weights, parameters)
            yield
        finally:
            _write(current, parameters)
        for name, parameter in parameters.items():
            assert _digest(parameter) == before[name], f"{name} changed while the reference was in its place"


def _copy(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters.items()}


def _write(weights: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name])


def _digest(parameter: Tensor) -> int:
    """The sum of the parameter's bits as integers."""
    words = parameter.detach().view(torch.int16 if parameter.element_size() == 2 else torch.int32)
    return int(words.sum(dtype=torch.int64))
