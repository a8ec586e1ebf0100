"""Trainer against engine: the gate before every update, and the fixed probe that proves a sync.

The gate compares them on the tokens just sampled; the probe on a few rows of random tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.parity import compare, explain
from megarl.config.schema import Config
from megarl.roles import Actor
from megarl.types import CheckFailed, LogProbs, TrainBatch

__all__ = ["Bound", "ParityGate", "parity_bound", "probe_tokens", "score_rows"]


@dataclass(frozen=True, slots=True)
class Bound:
    """Largest |trainer - engine| tolerated on any token, and on average over a batch; nats."""

    max: float
    mean: float


def parity_bound(config: Config) -> Bound:
    if config.checks.max_logprob_diff is not None:
        return Bound(config.checks.max_logprob_diff, config.checks.max_logprob_diff)
    return Bound(1e-4, 1e-4) if config.train.dtype == "fp32" else Bound(0.5, 0.02)


@dataclass(frozen=True)
class ParityGate:
    """roles.Checks. Every rank holds the same batch, so all of them refuse together."""

    bound: Bound
    is_moe: bool
    record: Callable[[Mapping[str, float]], None]

    def parity(self, batch: TrainBatch, logprobs: LogProbs) -> None:
        """Record logprob_diff/* and kl/rollout.

        Raises CheckFailed above the bound, saying what was seen and where to look.
        """
        seen = compare(batch, logprobs)
        self.record(seen.metrics())
        if seen.max <= self.bound.max and seen.mean <= self.bound.mean:
            return
        raise CheckFailed(
            f"log-probs of trainer and engine differ by {seen.max:.3g} at most and {seen.mean:.3g} on average "
            f"(bounds {self.bound.max:g} and {self.bound.mean:g}); "
            f"worst: row {seen.row}, sampled token {seen.position}, "
            f"trainer {seen.trainer:.6g}, engine {seen.engine:.6g}; "
            f"{explain(seen, is_moe=self.is_moe, temperature=batch.temperature)}. "
            "Nothing was updated; raise checks.max_logprob_diff only if you know why they differ"
        )


def probe_tokens(vocab: int, *, rows: int = 4, length: int) -> Tensor:
    """[rows, length] token ids, fixed, from the whole vocabulary."""
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(20))


def score_rows(actor: Actor, tokens_NL: Tensor) -> Tensor:
    """[N, L - 1] fp32: the trainer's log-probs of tokens[:, 1:] at temperature 1, on every rank."""
    num_rows, length = tokens_NL.shape
    labels_NL = tokens_NL.roll(-1, dims=1)
    mask_NL = torch.ones_like(tokens_NL, dtype=torch.bool)
    mask_NL[:, -1] = False
    zeros_T, zeros_N = torch.zeros(num_rows * length), torch.zeros(num_rows)
    batch = TrainBatch(
        tokens=tokens_NL.flatten(),
        labels=labels_NL.flatten(),
        mask=mask_NL.flatten(),
        rollout_logprobs=zeros_T,
        token_rewards=zeros_T,
        step_ends=zeros_T.bool(),
        outcome_at=torch.full((num_rows,), -1),
        cu_seqlens=torch.arange(num_rows + 1) * length,
        rewards=zeros_N,
        baseline=zeros_N,
        group=torch.arange(num_rows),
        prompt_id=torch.arange(num_rows),
        finish=zeros_N.long(),
        versions=torch.zeros(num_rows, 2, dtype=torch.int64),
        temperature=1.0,
    )
    return actor.logprobs(batch).old.view(num_rows, length)[:, :-1]
