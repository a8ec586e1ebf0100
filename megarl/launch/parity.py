"""Compares trainer and engine: the gate before every update, and the fixed probe that verifies a sync.

The gate compares log-probs on the tokens just sampled, the probe on a few rows of random tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.parity import FORMAT_EPS, Excess, compare, excess, explain
from megarl.config.schema import Config
from megarl.data.collate import token_batch
from megarl.trainer.rounding import rounding_errors
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, ScoredBatch, TrainBatch


@dataclass(frozen=True, slots=True)
class Bound:
    """Largest |trainer - engine| tolerated on any one token, and on average over a batch, in nats."""

    max: float
    mean: float


def parity_bound(config: Config) -> Bound:
    if config.checks.max_logprob_diff is not None:
        return Bound(config.checks.max_logprob_diff, config.checks.max_logprob_diff)
    return Bound(1e-4, 1e-4) if config.train.dtype == "fp32" else Bound(0.5, 0.02)


@dataclass(frozen=True)
class ParityGate:
    """roles.Checks. Every rank has the same batch, so all ranks refuse together."""

    bound: Bound
    is_moe: bool

    def parity(self, batch: ScoredBatch) -> dict[str, float]:
        """Returns logprob_diff/* and kl/rollout; raises CheckFailed, with a likely cause, above the bound."""
        parity = compare(batch)
        if parity.max <= self.bound.max and parity.mean <= self.bound.mean:
            return parity.metrics()
        raise CheckFailed(
            f"log-probs of trainer and engine differ by {parity.max:.3g} at most and {parity.mean:.3g} on average "
            f"(bounds {self.bound.max:g} and {self.bound.mean:g}); "
            f"worst: row {parity.row}, sampled token {parity.position}, "
            f"trainer {parity.trainer:.6g}, engine {parity.engine:.6g}; "
            f"{explain(parity, is_moe=self.is_moe, temperature=batch.temperature)}. "
            "Nothing was updated; raise checks.max_logprob_diff only if you know why they differ"
        )


def measure_excess(trainer: Trainer, batch: TrainBatch, *, draws: int = 4) -> Excess:
    """A collective. Compares the batch's rollout log-probs with the trainer's, and both with the floor."""
    dtype = "tf32" if trainer.train.dtype == "fp32" and trainer.device.type == "cuda" else trainer.train.dtype

    def logprobs() -> Tensor:
        logprobs_T = trainer.forward(batch).logprobs_T
        assert logprobs_T is not None
        return logprobs_T

    exact_T, noise = logprobs(), []
    for draw in range(draws):
        with rounding_errors(trainer.model, FORMAT_EPS[dtype], seed=draw * trainer.layout.world + trainer.layout.rank):
            noise.append(logprobs() - exact_T)
    return excess(batch, exact_T, torch.stack(noise))


def probe_tokens(vocab: int, *, rows: int = 4, length: int) -> Tensor:
    """Returns [rows, length] token ids from the whole vocabulary, the same at every call."""
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(20))


def score_rows(trainer: Trainer, tokens_NL: Tensor) -> Tensor:
    """Returns [N, L - 1] fp32: the trainer's log-probs of tokens[:, 1:] at temperature 1, on every rank."""
    rows = [(tokens_L, torch.ones_like(tokens_L, dtype=torch.bool)) for tokens_L in tokens_NL]
    logprobs_T = trainer.forward(token_batch(rows, temperature=1.0)).logprobs_T
    assert logprobs_T is not None
    return logprobs_T.view(tokens_NL.shape)[:, :-1]
