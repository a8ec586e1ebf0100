"""Compares trainer and engine: on a probe before a version commits, and on every batch before its update.

Both are bounded by what rounding explains for this model on these tokens (ARCHITECTURE "Weights"), unless
checks.max_logprob_diff sets a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megarl.algorithms.parity import FORMAT_EPS, Excess, Quantiles, compare, explain, rounding_floor
from megarl.data.collate import token_batch
from megarl.trainer.rounding import rounding_errors
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, ScoredBatch, TokenBatch
from megarl.weights.transports import Transport

PROBE_PROMPTS = 8
PROBE_TOKENS = 32  # that the engine adds to each
DRAWS = 4  # of rounding errors


class ProbedEngine(Protocol):
    """The engine of this rank: rollout.engine.Engine."""

    def complete(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[Tensor]: ...
    def score(self, rows: Sequence[Tensor]) -> list[Tensor]: ...


@dataclass(frozen=True, slots=True)
class Measured:
    """Log-probs [K] of the tokens in the mask, and what two correct implementations of them differ by."""

    logprobs_K: Tensor
    floor: Quantiles


def measure_logprobs(trainer: Trainer, batch: TokenBatch) -> Measured:
    """A collective of the trainer's ranks: one forward pass, and DRAWS with rounding errors."""
    dtype = "tf32" if trainer.train.dtype == "fp32" and trainer.device.type == "cuda" else trainer.train.dtype

    def logprobs() -> Tensor:
        logprobs_T = trainer.forward(batch).logprobs_T
        assert logprobs_T is not None
        return logprobs_T[batch.mask]

    exact_K, noise = logprobs(), []
    for draw in range(DRAWS):
        with rounding_errors(trainer.model, FORMAT_EPS[dtype], seed=draw * trainer.layout.world + trainer.layout.rank):
            noise.append(logprobs() - exact_K)
    return Measured(exact_K, rounding_floor(exact_K, torch.stack(noise)))


@dataclass
class ParityChecks:
    """roles.Checks and publish.Probe. A rank has a trainer, an engine, or both."""

    transport: Transport
    measure: Callable[[TokenBatch], Measured] | None  # the trainer's side
    engine: ProbedEngine | None
    prompts: Sequence[Sequence[int]]  # of the probe, as token ids; the same on every rank
    max_tokens: int = PROBE_TOKENS
    max_diff: float | None = None  # bound on any token's difference, in nats; None: what rounding explains
    always: bool = False
    is_moe: bool = False
    floor: Quantiles | None = None  # as last measured

    def check(self) -> None:
        """publish.Probe."""
        worst = max(self.probe(), key=lambda excess: (excess.statistic, excess.found.max))
        if not (worst.is_explained if self.max_diff is None else worst.found.max <= self.max_diff):
            raise CheckFailed(
                f"after the weight sync the engine's log-probs differ from the trainer's by up to "
                f"{worst.found.max:.3g}, although every byte arrived: it repacks weights incorrectly or computes "
                f"something else; {self._bound(worst)}"
            )

    def probe(self) -> list[Excess]:
        """A collective. Returns the comparison with each rank of the engine, on every rank.

        The engine continues the prompts, so that the tokens are likely ones: in the tail of the distribution, where
        random tokens lie, low precision is at its worst. Both sides score them at temperature 1.
        """
        lengths = [len(prompt) + self.max_tokens for prompt in self.prompts]
        flat_T = torch.zeros(sum(lengths), dtype=torch.int64)
        if self.engine:
            flat_T = torch.cat(self.engine.complete(self.prompts, max_tokens=self.max_tokens))
        rows = self._first(flat_T, has_one=self.engine is not None).split(lengths)
        is_new = [torch.arange(length) >= length - self.max_tokens for length in lengths]
        batch = token_batch(list(zip(rows, is_new, strict=True)), temperature=1.0)
        logprobs_K, floor, found = torch.zeros(int(batch.mask.sum())), None, None
        if self.measure:
            measured = self.measure(batch)
            logprobs_K, floor = measured.logprobs_K, measured.floor
        logprobs_K = self._first(logprobs_K, has_one=self.measure is not None)
        self.floor = floor = next(each for each in self.transport.gather(floor) if each is not None)
        if self.engine:
            scores_K = torch.cat([score[-self.max_tokens :] for score in self.engine.score(rows)])
            found = Quantiles.of(logprobs_K - scores_K)
        return [Excess(each, floor) for each in self.transport.gather(found) if each is not None]

    def parity(self, batch: ScoredBatch) -> dict[str, float]:
        """roles.Gate: compares the tokens just sampled. Every rank has the same batch, so all refuse together.

        The floor is that of an earlier batch, and measured on this one before it is refused.
        """
        parity, found = compare(batch), self._sampled(batch)
        excess = Excess(found, self.floor or self._remeasured(batch))
        if self.max_diff is not None:
            is_fine = max(parity.max, parity.mean) <= self.max_diff
        elif not (is_fine := excess.is_explained):
            excess = Excess(found, self._remeasured(batch))
            is_fine = excess.is_explained
        if is_fine:
            return parity.metrics() | {"logprob_diff/statistic": excess.statistic}
        raise CheckFailed(
            f"log-probs of trainer and engine differ by {parity.max:.3g} at most and {parity.mean:.3g} on average "
            f"({self._bound(excess)}); worst: row {parity.row}, sampled token {parity.position}, "
            f"trainer {parity.trainer:.6g}, engine {parity.engine:.6g}; "
            f"{explain(parity, is_moe=self.is_moe, temperature=batch.temperature)}. "
            "Nothing was updated; set checks.max_logprob_diff only if you know why they differ"
        )

    def _bound(self, excess: Excess) -> str:
        return str(excess) if self.max_diff is None else f"checks.max_logprob_diff={self.max_diff:g}"

    def _sampled(self, batch: ScoredBatch) -> Quantiles:
        assert batch.old_logprobs is not None
        return Quantiles.of((batch.old_logprobs - batch.rollout_logprobs)[batch.mask])

    def _remeasured(self, batch: ScoredBatch) -> Quantiles:
        assert self.measure is not None
        self.floor = self.measure(batch).floor
        return self.floor

    def _first(self, x: Tensor, *, has_one: bool) -> Tensor:
        """Returns `x` of the first rank that has one, on every rank; all have its size."""
        first = self.transport.gather(has_one).index(True)
        return self.transport.sum(x if self.transport.rank == first else torch.zeros_like(x))
