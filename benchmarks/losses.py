"""PPO's clipped loss, token mean, with the gradient to the log-probs: time and peak memory, against verl.

The same numbers padded [B, L] for verl, flat [B * L] for megarl; rows are half to completely full. The gradient is
compared. verl's mask is float32, with which it is fastest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.frame import Case, Contender
from benchmarks.peers import verl_core_algos
from megarl.algorithms.aggregation import token_weights
from megarl.algorithms.losses import Tokens, loss_and_clip

__all__ = ["CASES", "ours", "verls"]

SIZES = ((256, 1024), (2048, 1024), (1024, 8192))
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.2, 0.28, 10.0

CASES = tuple(
    Case(
        f"ppo_clip {rows}x{length}",
        (
            Contender("megarl", "benchmarks.losses:ours"),
            Contender("verl", "benchmarks.losses:verls"),
        ),
        {"rows": rows, "length": length},
        threads=(1, 2),
        rtol=1e-4,
        atol=1e-10,
        with_memory=True,
        at_least=0.5,
    )
    for rows, length in SIZES
)


def _batch(rows: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log-probs, old log-probs, advantages, mask: [B, L]."""
    random = torch.Generator().manual_seed(0)
    lengths_B = torch.randint(length // 2, length + 1, (rows,), generator=random)
    mask_BL = torch.arange(length) < lengths_B[:, None]
    old_BL = -torch.rand(rows, length, generator=random)
    new_BL = old_BL + 0.2 * torch.randn(rows, length, generator=random)
    advantages_BL = torch.randn(rows, 1, generator=random) * mask_BL
    return new_BL, old_BL, advantages_BL, mask_BL


def _call(loss_of: Callable[[Tensor], Tensor], logprobs: Tensor) -> Callable[[], np.ndarray]:
    logprobs.requires_grad_()

    def call() -> np.ndarray:
        logprobs.grad = None
        loss = loss_of(logprobs)
        loss.backward()
        assert logprobs.grad is not None
        return logprobs.grad.numpy().reshape(-1)

    return call


def ours(rows: int, length: int) -> Callable[[], np.ndarray]:
    new_T, old_T, advantages_T, mask_T = (x_BL.flatten() for x_BL in _batch(rows, length))
    cu_seqlens = torch.arange(rows + 1) * length
    clip = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "dual_clip": DUAL_CLIP}

    def loss_of(logprobs_T: Tensor) -> Tensor:
        tokens = Tokens.of(logprobs_T, old_T, advantages_T, mask_T, cu_seqlens)
        loss_T, _ = loss_and_clip("ppo_clip", tokens, **clip)
        weights_T = token_weights("token-mean", tokens.rows, None, None)
        return (loss_T * weights_T.to(loss_T.dtype)).sum()

    return _call(loss_of, new_T)


class _ActorConfig:
    """The fields of verl's actor config that its loss reads."""

    clip_ratio = CLIP_LOW
    clip_ratio_low = CLIP_LOW
    clip_ratio_high = CLIP_HIGH
    global_batch_info: dict[str, Any] = {}  # noqa: RUF012

    def get(self, name: str, default: float) -> float:
        return DUAL_CLIP if name == "clip_ratio_c" else default


def verls(rows: int, length: int) -> Callable[[], np.ndarray]:
    new_BL, old_BL, advantages_BL, mask_BL = _batch(rows, length)
    at = {"response_mask": mask_BL.float(), "loss_agg_mode": "token-mean", "config": _ActorConfig()}
    loss = verl_core_algos().compute_policy_loss_vanilla
    return _call(lambda logprobs_BL: loss(old_BL, logprobs_BL, advantages_BL, **at)[0], new_BL)
