"""Advantages from rewards, against verl: the same numbers padded [B, L] on its side, flat [B * L] on ours.

Rows are half to completely full. The reward is an outcome on the last token ("outcome"), or that minus KL on every
token ("kl"). verl's trainer passes an int64 mask; a float32 mask is faster and is measured too.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from benchmarks.frame import Case, Contender
from benchmarks.peers import verl_core_algos
from megarl.algorithms import ADVANTAGES

__all__ = ["CASES", "ours", "verls"]

GROUP = 8
SIZES = ((2048, 1024), (1024, 8192))
VERLS = {  # megarl's name -> verl's function
    "reinforce_pp": "compute_reinforce_plus_plus_outcome_advantage",
    "reinforce_pp_baseline": "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "grpo": "compute_grpo_vectorized_outcome_advantage",
}


def _case(name: str, rewards: str, size: tuple[int, int], at_least: float | None) -> Case:
    rows, length = size
    contenders = (
        Contender("megarl", "benchmarks.advantages:ours"),
        Contender("verl", "benchmarks.advantages:verls", {"mask": "int64"}),
        Contender("verl, float mask", "benchmarks.advantages:verls", {"mask": "float32"}),
    )
    arguments = {"name": name, "rewards": rewards, "rows": rows, "length": length}
    # verl adds 1e-8 to counts and computes statistics in fp32
    title = f"{name} {rows}x{length} {rewards}"
    return Case(title, contenders, arguments, threads=(1, 2), rtol=1e-4, atol=1e-4, at_least=at_least)


CASES = (
    *(_case("reinforce_pp", rewards, size, 0.5) for size in SIZES for rewards in ("outcome", "kl")),
    *(_case("reinforce_pp_baseline", "outcome", size, 0.5) for size in SIZES),
    *(_case("grpo", "outcome", size, None) for size in SIZES),
)


def _batch(rewards: str, rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """rewards [B, L] fp32, mask [B, L] bool, group [B]."""
    random = torch.Generator().manual_seed(0)
    lengths_B = torch.randint(length // 2, length + 1, (rows,), generator=random)
    mask_BL = torch.arange(length) < lengths_B[:, None]
    rewards_BL = torch.zeros(rows, length)
    rewards_BL[torch.arange(rows), lengths_B - 1] = torch.randint(0, 2, (rows,), generator=random).float()
    if rewards == "kl":
        rewards_BL -= 0.01 * torch.randn(rows, length, generator=random) * mask_BL
    return rewards_BL, mask_BL, torch.arange(rows) // GROUP


def ours(name: str, rewards: str, rows: int, length: int) -> Callable[[], np.ndarray]:
    rewards_BL, mask_BL, group_B = _batch(rewards, rows, length)
    cu_seqlens = torch.arange(rows + 1) * length
    at = (rewards_BL.flatten(), mask_BL.flatten(), cu_seqlens, group_B)
    return lambda: ADVANTAGES[name](*at).numpy()


def verls(name: str, rewards: str, rows: int, length: int, mask: str) -> Callable[[], np.ndarray]:
    rewards_BL, mask_BL, group_B = _batch(rewards, rows, length)
    estimate = getattr(verl_core_algos(), VERLS[name])
    typed_mask_BL = mask_BL.to({"int64": torch.int64, "float32": torch.float32}[mask])
    at = {"token_level_rewards": rewards_BL, "response_mask": typed_mask_BL, "config": SimpleNamespace(gamma=1.0)}
    if name != "reinforce_pp":
        at["index"] = group_B.numpy()
    return lambda: estimate(**at)[0].numpy().reshape(-1)
