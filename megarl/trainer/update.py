"""One optimizer step's worth of micro-batches: losses weighted, summed, and what was learnt reduced over the world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.objective import LossInputs, token_losses
from megarl.config.schema import Algorithm
from megarl.layout import Axis
from megarl.trainer.logprobs import TokenOutputs
from megarl.trainer.microbatch import Microbatch, pack
from megarl.types import ScoredBatch

__all__ = ["UpdateLoss", "global_sums"]


@dataclass
class UpdateLoss:
    """Called with the outputs of each micro-batch on the last stage: gives its loss and adds up the sums.

    `sums` begins with those of no rows at all, so every rank, whatever its stage, knows all their names.
    """

    batch: ScoredBatch
    weights: Tensor  # [T] fp64, of the whole batch
    select: Tensor  # [T] bool
    algorithm: Algorithm
    device: torch.device
    sums: dict[str, Tensor] = field(default_factory=dict)  # 0-d fp64, over the micro-batches of this rank

    def __post_init__(self) -> None:
        nothing = pack(self.batch, (), tensor=1, context=Axis(1), device=self.device)
        zeros = torch.zeros(0, device=self.device)
        self(nothing, TokenOutputs(zeros, zeros))

    def __call__(self, microbatch: Microbatch, outputs: TokenOutputs) -> Tensor:
        def part(x_T: Tensor) -> Tensor:
            return x_T[microbatch.index].to(self.device)

        batch = self.batch
        inputs = LossInputs(
            old_logprobs=part(batch.old_logprobs),
            ref_logprobs=None if batch.ref_logprobs is None else part(batch.ref_logprobs),
            rollout_logprobs=part(batch.rollout_logprobs),
            advantages=part(batch.advantages),
            mask=microbatch.mask,
            cu_seqlens=microbatch.cu_seqlens,
            select=part(self.select),
            kl_coef=batch.kl_coef,
        )
        losses = token_losses(outputs.logprobs_T, outputs.entropy_T, inputs, self.algorithm)
        weights = part(self.weights)
        # fp64: a loss at step 0 is a sum of advantages that nearly cancel
        value = (losses.loss.detach().double() * weights).sum()
        for name, total in {**losses.sums, "loss": value}.items():
            self.sums[name] = self.sums.get(name, 0.0) + total
        return (losses.loss * weights.to(losses.loss.dtype)).sum()


def global_sums(sums: Mapping[str, Tensor], *, counts: bool) -> dict[str, float]:
    """The sums over all ranks for which `counts` (one for each distinct set of rows), the same on every rank."""
    names = sorted(sums)
    values = torch.stack([sums[name] for name in names])
    if not counts:
        values.zero_()
    dist.all_reduce(values)
    return dict(zip(names, values.tolist(), strict=True))
