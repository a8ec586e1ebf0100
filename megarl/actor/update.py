"""One optimizer step's worth of micro-batches: losses weighted, summed, and what was learnt reduced over the world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.actor.forward import Microbatch
from megarl.actor.logprobs import TokenOutputs
from megarl.algorithms.objective import LossInputs, token_losses
from megarl.config.schema import Algorithm
from megarl.types import ScoredBatch

__all__ = ["UpdateLoss", "global_sums"]


@dataclass
class UpdateLoss:
    """Called with the outputs of each micro-batch on the last stage: gives its loss and adds up the sums."""

    batch: ScoredBatch
    weights: Tensor  # [T] fp64, of the whole batch
    algorithm: Algorithm
    sums: dict[str, Tensor] = field(default_factory=dict)  # 0-d fp64, over the micro-batches of this rank

    def __call__(self, microbatch: Microbatch, outputs: TokenOutputs) -> Tensor:
        device = outputs.logprobs_T.device

        def part(x_T: Tensor) -> Tensor:
            return x_T[microbatch.index].to(device)

        batch = self.batch
        inputs = LossInputs(
            old_logprobs=part(batch.old_logprobs),
            ref_logprobs=None if batch.ref_logprobs is None else part(batch.ref_logprobs),
            rollout_logprobs=part(batch.rollout_logprobs),
            advantages=part(batch.advantages),
            mask=microbatch.mask,
            cu_seqlens=microbatch.cu_seqlens,
        )
        losses = token_losses(outputs.logprobs_T, outputs.entropy_T, inputs, self.algorithm)
        weights = part(self.weights)
        self._add(losses.sums | {"loss": (losses.loss.detach().double() * weights).sum()})
        # Positions outside the mask carry weight 0; their loss is exactly 0 too, so no NaN can come from there.
        return (losses.loss * weights.to(losses.loss.dtype)).sum()

    def _add(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value


def global_sums(sums: Mapping[str, Tensor], *, counts: bool, device: torch.device) -> dict[str, float]:
    """The sums over all ranks for which `counts` (one per distinct set of rows), the same on every rank.

    Every rank must call; the names are learnt from rank 0 of those that count, so stages without a loss may pass {}.
    """
    names: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(names, sorted(sums))
    every = max(names, key=len)
    values = torch.zeros(len(every), dtype=torch.float64, device=device)
    if counts:
        for at, name in enumerate(every):
            if name in sums:
                values[at] = sums[name]
    dist.all_reduce(values)
    return dict(zip(every, values.tolist(), strict=True))
