"""Advantages from rewards, against verl: the same rows as each trainer has them, padded [B, L] or end to end [T].

Rows are half to completely full, so a quarter of verl's positions are padding; outputs on real tokens are compared. The
reward is an outcome on the last token ("outcome"), or that minus KL on every token ("kl"). verl's trainer passes an
int64 mask; a float32 mask is faster and is measured too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.frame import Case, Contender, Outcome
from benchmarks.peers import verl_core_algos
from megarl.algorithms.advantages import ADVANTAGES

__all__ = ["CASES", "ours", "verls"]

GROUP = 8
SIZES = ((2048, 1024), (1024, 8192))
VERLS = {  # megarl's name -> verl's function
    "reinforce_pp": "compute_reinforce_plus_plus_outcome_advantage",
    "reinforce_pp_baseline": "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "grpo": "compute_grpo_vectorized_outcome_advantage",
}


def _case(name: str, rewards: str, size: tuple[int, int]) -> Case:
    rows, length = size
    contenders = (
        Contender("megarl", "benchmarks.advantages:ours"),
        Contender("verl", "benchmarks.advantages:verls", {"mask": "int64"}),
        Contender("verl, float mask", "benchmarks.advantages:verls", {"mask": "float32"}),
    )
    arguments = {"name": name, "rewards": rewards, "rows": rows, "length": length}
    # verl adds 1e-8 to counts and computes statistics in fp32
    title = f"{name} {rows}x{length} {rewards}"
    return Case(title, contenders, arguments, threads=(1, 2), rtol=1e-4, atol=1e-4, at_least=0.5)


CASES = (
    *(_case("reinforce_pp", rewards, size) for size in SIZES for rewards in ("outcome", "kl")),
    *(_case("reinforce_pp_baseline", "outcome", size) for size in SIZES),
    *(_case("grpo", "outcome", size) for size in SIZES),
)


def _batch(rewards: str, rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """rewards [B, L] fp32, mask [B, L] bool, group [B]."""
    random = torch.Generator().manual_seed(0)
    lengths_B = torch.randint(length // 2, length + 1, (rows,), generator=random)
    mask_BL = torch.arange(length) < lengths_B[:, None]
    rewards_BL = torch.zeros(rows, length)
    rewards_BL[torch.arange(rows), lengths_B - 1] = torch.randint(
        0, 2, (rows,), generator=random
    ).float()
    if rewards == "kl":
        rewards_BL -= 0.01 * torch.randn(rows, length, generator=random) * mask_BL
    return rewards_BL, mask_BL, torch.arange(rows) // GROUP


def ours(name: str, rewards: str, rows: int, length: int) -> Callable[[], Outcome]:
    rewards_BL, mask_BL, group_B = _batch(rewards, rows, length)
    rewards_T, lengths_B = rewards_BL[mask_BL], mask_BL.sum(1)
    at = (
        rewards_T,
        torch.ones_like(rewards_T, dtype=torch.bool),
        torch.cat([lengths_B[:1] * 0, lengths_B.cumsum(0)]),
    )
    return lambda: _timed(lambda: ADVANTAGES[name](*at, group_B))


def verls(name: str, rewards: str, rows: int, length: int, mask: str) -> Callable[[], Outcome]:
    rewards_BL, mask_BL, group_B = _batch(rewards, rows, length)
    estimate = getattr(verl_core_algos(), VERLS[name])
    typed_mask_BL = mask_BL.to({"int64": torch.int64, "float32": torch.float32}[mask])
    at = {
        "token_level_rewards": rewards_BL,
        "response_mask": typed_mask_BL,
        "config": SimpleNamespace(gamma=1.0),
    }
    if name != "reinforce_pp":
        at["index"] = group_B.numpy()
    return lambda: _timed(lambda: estimate(**at)[0], mask_BL)


def _timed(call: Callable[[], Tensor], mask_BL: Tensor | None = None) -> Outcome:
    start = time.perf_counter()
    advantages = call()
    seconds = time.perf_counter() - start
    return Outcome((advantages if mask_BL is None else advantages[mask_BL]).numpy(), seconds)
