"""One optimizer step's worth of micro-batches: losses weighted and summed, measurements reduced over the world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.types import Loss, MicrobatchRows, TokenOutputs

__all__ = ["LossSums", "global_sums"]


@dataclass
class LossSums:
    """Called with the outputs of each micro-batch on the last stage: returns its weighted loss and adds to the sums.

    `totals` starts from the sums of a micro-batch without rows, so every rank of every stage has the same names.
    """

    loss: Loss
    weights_T: Tensor  # [T] fp64, each token's share of the loss, of the whole batch
    totals: dict[str, Tensor] = field(default_factory=dict)  # 0-d fp64, over the micro-batches of this rank

    @classmethod
    def of(cls, loss: Loss, weights_T: Tensor, fields: tuple[str, ...], device: torch.device) -> LossSums:
        """`fields` of TokenOutputs are what the head computes."""
        sums = cls(loss, weights_T)
        start, nothing = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(0, device=device)
        sums(MicrobatchRows((), torch.arange(0), start, nothing.bool()), TokenOutputs(**dict.fromkeys(fields, nothing)))
        return sums

    def __call__(self, rows: MicrobatchRows, outputs: TokenOutputs) -> Tensor:
        losses, weights_M = self.loss(outputs, rows), rows.select(self.weights_T)
        # fp64: at the first update a loss is a sum of advantages that nearly cancel
        value = (losses.loss.detach().double() * weights_M).sum()
        for name, total in {**losses.sums, "loss": value, "count": losses.count}.items():
            self.totals[name] = self.totals.get(name, 0.0) + total.detach().double()
        return (losses.loss * weights_M.to(losses.loss.dtype)).sum()


def global_sums(sums: Mapping[str, Tensor], *, counts: bool) -> dict[str, float]:
    """The sums over all ranks whose `counts` is True (one for each distinct set of rows), the same on every rank."""
    names = sorted(sums)
    values = torch.stack([sums[name] for name in names])
    if not counts:
        values.zero_()
    dist.all_reduce(values)
    return dict(zip(names, values.tolist(), strict=True))
