"""A weight receiver that writes into plain tensors, for example those of a file being exported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megarl.models.shards import ShardSlice
from megarl.weights.checksum import copy_and_verify, positional_checksum
from megarl.weights.execute import split_message, strided_view
from megarl.weights.plan import Message


class MemoryReceiver:
    """publish.WeightReceiver. `memory` has every `param` of the slices, which count elements of `dtype`."""

    def __init__(self, slices: Sequence[ShardSlice], memory: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.slices = slices
        self.memory = memory
        self.version: int | None = None
        self.device = next((tensor.device for tensor in memory.values()), torch.device("cpu"))
        self._dtype = dtype
        self._loaded: dict[str, int] = {}  # elements received of each HF tensor

    def begin(self, *, check_placement: bool) -> None:
        self._loaded, self.version = {}, None

    def write(self, message: Message, flat: Tensor) -> Tensor:
        wrong = torch.zeros((), dtype=torch.int64, device=flat.device)
        for transfer, part in split_message(message, flat):
            where = transfer.destination
            wrong += copy_and_verify(part, strided_view(self.memory[where.param], where, part.shape, self._dtype))
            self._loaded[transfer.name] = self._loaded.get(transfer.name, 0) + transfer.numel
        return wrong

    def seal(self) -> Mapping[str, int]:
        return self._loaded

    def positional_checksums(self) -> Tensor:
        views = ((strided_view(self.memory[x.param], x, x.shape, self._dtype), x.start) for x in self.slices)
        sums = [positional_checksum(view, start) for view, start in views]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=self.device)

    def finish(self, version: int) -> None:
        self.version = version

    def abort(self) -> None:
        self.version = None
