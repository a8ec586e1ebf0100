"""The gate before every update: trainer and engine must agree on the tokens just sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megarl.algorithms.parity import compare, explain
from megarl.config.schema import Config
from megarl.types import CheckFailed, LogProbs, TrainBatch

__all__ = ["Bound", "ParityGate", "parity_bound"]


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
            f"(bounds {self.bound.max:g} and {self.bound.mean:g}); worst: row {seen.row}, sampled token {seen.position}, "
            f"trainer {seen.trainer:.6g}, engine {seen.engine:.6g}; "
            f"{explain(seen, is_moe=self.is_moe, temperature=batch.temperature)}. "
            "Nothing was updated; raise checks.max_logprob_diff only if you know why they differ"
        )
