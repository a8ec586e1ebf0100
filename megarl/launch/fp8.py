"""FP8 rollouts: the quantiser of a rank's weights, for the sync, and for comparing the trainer with the engine."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megarl.launch.build import Rank
from megarl.models.fp8 import with_scales
from megarl.models.shards import slices_of
from megarl.planner.weight_sync import rollout_format
from megarl.trainer.trainer import Trainer
from megarl.weights.fp8 import Fp8Quantizer


def make_quantizer(rank: Rank, trainer: Trainer) -> Fp8Quantizer | None:
    """Returns None if the engine does not quantise."""
    fmt = rollout_format(rank.config, rank.shape)
    if fmt is None:
        return None

    def reduce_max(values: Tensor, is_expert: bool) -> None:
        group = trainer.groups.expert_tensor if is_expert else trainer.groups.tensor
        if group.size() > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=group)

    assert trainer.table is not None
    table = with_scales(trainer.table, fmt, is_whole=True)
    return Fp8Quantizer(slices_of(table, trainer.shape, trainer.layout), fmt, reduce_max)
