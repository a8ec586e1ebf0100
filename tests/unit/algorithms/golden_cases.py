"""The golden vectors as flat batches. NaN stands at every masked position: nothing there may matter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).parents[2] / "golden"
CASES = (
    "basic", "mixed_groups", "multiturn", "zero_variance", "extreme", "process", "masked_row", "onpolicy",
    "singletons", "reward_on_hole", "long",
)  # fmt: skip
DTYPES = {"f32": torch.float32, "f64": torch.float64}

Outputs = dict[str, Tensor]  # name of a peer's output -> what we get
# an entry's name -> how it is written with ours
RULES: list[tuple[re.Pattern[str], Callable[..., Outputs]]] = []


def rule(pattern: str) -> Callable[[Callable[..., Outputs]], Callable[..., Outputs]]:
    def add(function: Callable[..., Outputs]) -> Callable[..., Outputs]:
        RULES.append((re.compile(pattern), function))
        return function

    return add


@dataclass(frozen=True)
class Case:
    """One case at one precision. Rows keep their own length (that of the attention mask), padding is gone."""

    name: str
    dtype: str
    entries: tuple[dict[str, Any], ...]

    tensors: dict[str, Tensor]

    def raw(self, name: str) -> Tensor:
        """An input as it is stored: [B, T] or [B]."""
        x = self.tensors[f"in/{name}"]
        return x.to(DTYPES[self.dtype]) if x.is_floating_point() else x

    @property
    def kept(self) -> Tensor:
        """[B, T] bool: what is not padding."""
        return self.raw("attention_mask").bool()

    @property
    def mask(self) -> Tensor:
        return self.raw("response_mask").bool()[self.kept]

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.nn.functional.pad(self.kept.sum(1).cumsum(0), (1, 0))

    @property
    def group(self) -> Tensor:
        return self.raw("index")

    def flat(self, name: str) -> Tensor:
        """An input [B, T] as [sum of lengths], NaN where the mask is False."""
        x = self.raw(name)[self.kept]
        return torch.where(self.mask, x, float("nan")) if x.is_floating_point() else x

    def output(self, entry: str, name: str) -> Tensor | None:
        return self.tensors.get(f"out/{entry}@{self.dtype}/{name}")

    def rewards(self, name: str = "token_level_scores", *, on_hole: str = "move") -> Tensor:
        """Token rewards; one at a masked position moves to the trained one before it, or is dropped."""
        rewards_BT, mask_BT = self.raw(name), self.raw("response_mask").bool()
        if on_hole == "move":
            rewards_BT = rewards_BT.clone()
            for row, place in (rewards_BT * ~mask_BT).nonzero().tolist():
                before = mask_BT[row, :place].nonzero().flatten()
                if before.numel():
                    rewards_BT[row, before[-1]] += rewards_BT[row, place]
        return torch.where(self.mask, rewards_BT[self.kept], float("nan"))

    def outcome(self, scores: Tensor) -> Tensor:
        """[B] scores as token rewards on the last trained position of each row."""
        rewards_T = torch.zeros(self.mask.numel(), dtype=scores.dtype)
        for row, (start, end) in enumerate(
            zip(self.cu_seqlens[:-1], self.cu_seqlens[1:], strict=True)
        ):
            trained = self.mask[start:end].nonzero().flatten()
            if trained.numel():
                rewards_T[start + trained[-1]] = scores[row]
        return torch.where(self.mask, rewards_T, float("nan"))

    def padded(self, x_T: Tensor) -> Tensor:
        """[B, T] again, 0 in the padding."""
        x_BT = torch.zeros(self.kept.shape, dtype=x_T.dtype)
        x_BT[self.kept] = x_T
        return x_BT


@cache
def load_case(name: str, dtype: str) -> Case:
    entries = json.loads((FOLDER / f"{name}.json").read_text())["entries"]
    chosen = tuple(entry for entry in entries if dtype in entry.get("dtypes", ()))
    return Case(name, dtype, chosen, load_file(FOLDER / f"{name}.safetensors"))


# Peers that are not exact in fp64 themselves: (entry, rtol, atol, why)
INEXACT = (
    (r"verl\.adv\.grpo_vectorized.*", 1e-5, 1e-6, "computes in fp32 whatever it is given"),
    (r"verl\.adv\.(grpo|rloo).*", 1e-9, 1e-7, "an fp32 constant for groups of one"),
    (r"verl\.(adv|masked_whiten).*", 1e-9, 1e-9, "1e-8 added to the token count"),
    (
        r"verl\..*seq-mean-token-mean.*|verl\.loss\.gspo.*",
        1e-7,
        1e-9,
        "1e-8 added to the row's token count",
    ),
    (
        r"ref\.adv\.reinforce_plus_plus",
        1e-7,
        1e-7,
        "divides by std + 1e-8, not by sqrt(var + 1e-8)",
    ),
)


def tolerance(case: Case, entry_id: str) -> dict[str, float]:
    """ALGORITHMS, section 6."""
    if case.dtype == "f32":
        is_whitened = re.search(r"gae|plus_plus|whiten", entry_id)
        return {"rtol": 1e-4, "atol": 1e-4} if is_whitened else {"rtol": 1e-5, "atol": 1e-6}
    for pattern, rtol, atol, _ in INEXACT:
        if re.fullmatch(pattern, entry_id):
            return {"rtol": rtol, "atol": atol}
    return {"rtol": 1e-6 if case.name == "extreme" else 1e-9, "atol": 1e-12}
