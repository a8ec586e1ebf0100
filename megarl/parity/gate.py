"""Compares trainer and engine: on a probe before a version commits, and on every batch before its update.

Both are bounded by what rounding explains for this model on these tokens (ARCHITECTURE "Weights"), unless
checks.max_logprob_diff sets a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.algorithms.parity import (
    FORMAT_EPS,
    LOG_SOFTMAX_ERROR,
    Excess,
    Parity,
    Quantiles,
    compare,
    explain,
    rounding_floor,
)
from megarl.data.collate import Batch, take_rows, token_batch
from megarl.debug.sublayers import rounding_errors
from megarl.launch.build import Rank, make_prompts
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, ScoredBatch, TokenBatch
from megarl.weights.fp8 import Fp8Quantizer
from megarl.weights.transports import Transport

PROBE_PROMPTS = 8
MOE_PROBE_PROMPTS = 32
PROBE_TOKENS = 32  # that the engine adds to each
DRAWS, ENOUGH = 4, 2048  # of rounding errors, at most; tokens in all draws
REMEASURED_EVERY = 10  # batches, at most
CAUSE_ROWS = 8


class ScoringEngine(Protocol):
    """A replica of the engine (rollout.engine.Engine)."""

    @property
    def is_asleep(self) -> bool: ...
    def complete(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[Tensor]: ...
    def score(self, rows: Iterable[Tensor]) -> list[Tensor]: ...


@dataclass(frozen=True, slots=True)
class Measured:
    """Log-probs [K] of the tokens in the mask, and what two correct implementations of them differ by."""

    logprobs_K: Tensor  # with the engine's weights, if it quantises them
    floor: Quantiles
    of_policy: (
        Quantiles  # the floor of log-probs of the trained weights, which the engine may quantise
    )


def rounding_of(trainer: Trainer, *, is_fp8: bool = False) -> float:
    """Returns the relative rounding error of a sublayer's output. `is_fp8`: the engine's weights are FP8, and on a GPU
    also the activations that they are multiplied with."""
    dtype = (
        "fp8" if trainer.fp8 or (is_fp8 and trainer.device.type == "cuda") else trainer.train.dtype
    )
    return FORMAT_EPS["tf32" if dtype == "fp32" and trainer.device.type == "cuda" else dtype]


def sampled_rows(batch: Batch, count: int | None = None, *, first: int | None = None) -> Batch:
    """Returns the rows that have sampled tokens, at most `count` of them; row `first` before others."""
    masks = batch.mask.split(batch.cu_seqlens.diff().tolist())
    rows = [row for row, mask_L in enumerate(masks) if mask_L.any()]
    return take_rows(batch, sorted(rows, key=lambda row: row != first)[:count])


def measure_logprobs(
    trainer: Trainer, batch: TokenBatch, quantizer: Fp8Quantizer | None = None
) -> Measured:
    """A collective of the trainer's ranks: one forward pass, and up to DRAWS more with rounding errors; with a
    quantizer, under the weights that the engine has, after one more under those that are trained."""
    eps = rounding_of(trainer, is_fp8=quantizer is not None)
    trained_K, noise = trainer.logprobs(batch)[batch.mask], []
    with through_fp8(trainer, quantizer):
        seen_K = trained_K if quantizer is None else trainer.logprobs(batch)[batch.mask]
        for draw in range(min(DRAWS, ceil(ENOUGH / max(1, len(seen_K))))):
            with rounding_errors(trainer, eps, draw=draw):
                noise.append(trainer.logprobs(batch)[batch.mask] - seen_K)
    noise_DK = torch.stack(noise)
    floor, of_policy = (
        rounding_floor(seen_K, each_DK, error=LOG_SOFTMAX_ERROR)  # which doubles the variance
        for each_DK in (noise_DK, noise_DK + (seen_K - trained_K) / 2**0.5)
    )
    return Measured(seen_K, floor, of_policy)


def through_fp8(trainer: Trainer, quantizer: Fp8Quantizer | None) -> AbstractContextManager[None]:
    """Within it, the trainer's weights are those of an engine that quantises them."""
    return (
        nullcontext() if quantizer is None else quantizer.through_fp8(trainer.parameters_by_name())
    )


@dataclass
class ParityChecks:
    """roles.Checks and publish.Probe."""

    transport: Transport
    measure: Callable[[TokenBatch], Measured]  # the trainer's side
    engines: Sequence[
        ScoringEngine
    ] = ()  # this rank's; split: all replicas, or none where only the gate is
    prompts: Sequence[Sequence[int]] = ()  # of the probe, as token ids; the same on every rank
    max_tokens: int = PROBE_TOKENS
    max_diff: float | None = (
        None  # bound on any token's difference, in nats; None: what rounding explains
    )
    always: bool = False
    is_moe: bool = False
    replays: bool = False  # the trainer, the routes of rank 0's engine
    find: Callable[..., str | None] | None = None  # debug.parity_cause.CauseSearch.find
    floor: Quantiles | None = None  # of the policy's tokens, as last measured
    floor_age: int = REMEASURED_EVERY  # batches since, or many
    version: Callable[[], int | None] = lambda: (
        None
    )  # of the weights last published; None: all tokens have it

    def check(self) -> None:
        """publish.Probe."""
        batch, found = self.probe()
        worst = max(found, key=lambda excess: (excess.statistic, excess.found.max))
        if not (worst.is_explained if self.max_diff is None else worst.found.max <= self.max_diff):
            cause = self.find(batch, worst.floor) if self.find else None
            raise CheckFailed(
                f"after the weight sync the engine's log-probs differ from the trainer's by up to "
                f"{worst.found.max:.3g}, although every byte arrived: it repacks weights incorrectly or computes "
                f"something else; {self._bound(worst)}{f'; cause: {cause}' if cause else ''}"
            )

    def probe(self) -> tuple[TokenBatch, list[Excess]]:
        """A collective. Returns the rows and the comparison with each rank of the engine, on every rank.

        The engine continues the prompts, so that the tokens are likely ones: in the tail of the distribution, where
        random tokens lie, low precision is at its worst. Both sides score them at temperature 1.
        """
        lengths = [len(prompt) + self.max_tokens for prompt in self.prompts]
        completed = self.engines[0].complete(self.prompts, max_tokens=self.max_tokens)
        rows = self.transport.gather(torch.cat(completed))[0].split(lengths)
        is_new = [torch.arange(length) >= length - self.max_tokens for length in lengths]
        batch = token_batch(list(zip(rows, is_new, strict=True)), temperature=1.0)
        if self.replays:
            engine: Any = self.engines[0]  # in this process
            scores, routes = engine.score_with_routes(rows)
            all_scores, batch = [scores], replace(batch, routes=self.transport.gather(routes)[0])
        else:
            all_scores = [engine.score(rows) for engine in self.engines]
        measured = self.measure(batch)
        of_rank = (measured.floor, measured.of_policy, measured.logprobs_K)
        (floor, self.floor, logprobs_K), found = (
            self.transport.gather(of_rank)[0],
            list[Quantiles](),
        )
        for scores in all_scores:
            scores_K = torch.cat([score[-self.max_tokens :] for score in scores])
            found += self.transport.gather(Quantiles.of(logprobs_K - scores_K))
        return batch, [self.excess(each, floor, prompts=len(rows)) for each in found]

    def excess(self, found: Quantiles, floor: Quantiles, *, prompts: int) -> Excess:
        """With experts, only prompts are independent: a token that is routed elsewhere moves all that follow it."""
        return Excess(found, floor, prompts if self.is_moe else None)

    def parity(self, batch: ScoredBatch) -> dict[str, float]:
        """roles.Gate: compares the tokens just sampled. Every rank has the same batch, so all refuse together.

        Tokens of older weights, from which the trainer has moved on, are not judged; without others, the last probe was
        the judge. The floor is an earlier batch's; it is measured again before a refusal and, at most every
        REMEASURED_EVERY batches, where more than half of the limit is used up.
        """
        version = self.version()
        is_fresh_T = batch.mask & (batch.versions == version)
        if version is not None and not is_fresh_T.equal(batch.mask):
            batch = sampled_rows(replace(batch, mask=is_fresh_T))
            if not batch.num_rows:
                return {}
        assert batch.old_logprobs is not None
        found = Quantiles.of((batch.old_logprobs - batch.rollout_logprobs)[batch.mask])
        parity, prompts = compare(batch), batch.prompt_id.unique().numel()
        excess = self.excess(found, self.floor or self._remeasured(batch), prompts=prompts)
        self.floor_age += 1
        is_doubtful = excess.statistic > excess.limit / 2 and self.floor_age > REMEASURED_EVERY
        if self.max_diff is None and (is_doubtful or not excess.is_explained):
            excess = self.excess(found, self._remeasured(batch), prompts=prompts)
        if (
            excess.is_explained
            if self.max_diff is None
            else max(parity.max, parity.mean) <= self.max_diff
        ):
            return parity.metrics() | {
                "logprob_diff/statistic": excess.statistic,
                "logprob_diff/limit": excess.limit,
            }
        raise CheckFailed(
            f"log-probs of trainer and engine differ by {parity.max:.3g} at most and {parity.mean:.3g} on average "
            f"({self._bound(excess)}); worst: row {parity.row}, sampled token {parity.position}, "
            f"trainer {parity.trainer:.6g}, engine {parity.engine:.6g}; "
            f"{self._cause(batch, parity)}. "
            "Nothing was updated; set checks.max_logprob_diff only if you know why they differ"
        )

    def _cause(self, batch: ScoredBatch, parity: Parity) -> str:
        """Found on the first rows; guessed from the distribution of differences where the engine cannot compute."""
        guess = explain(parity, is_moe=self.is_moe, temperature=batch.temperature)
        if self.find is None or any(self.transport.gather(self.engines[0].is_asleep)):
            return f"{guess}; `megarl check --parity` looks for the cause"
        few = sampled_rows(batch, CAUSE_ROWS, first=parity.row)
        return f"cause: {self.find(few, self.measure(few).floor, few.rollout_logprobs) or guess}"

    def _bound(self, excess: Excess) -> str:
        return (
            str(excess) if self.max_diff is None else f"checks.max_logprob_diff={self.max_diff:g}"
        )

    def _remeasured(self, batch: ScoredBatch) -> Quantiles:
        self.floor, self.floor_age = self.measure(batch).of_policy, 0
        return self.floor


def make_checks(
    rank: Rank, measure: Callable[[TokenBatch], Measured], engines: Sequence[Any], **options: Any
) -> ParityChecks:
    """Checks whose probe continues training prompts; `options`: other fields."""
    config = rank.config
    added = max(1, min(PROBE_TOKENS, config.rollout.max_tokens - 1))
    longest = (
        engines[0].max_model_len - 1 - added
    )  # the engine scores one token less than it has room for
    count = MOE_PROBE_PROMPTS if rank.shape.is_moe else PROBE_PROMPTS
    return ParityChecks(
        rank.transport,
        measure,
        engines,
        [prompt.tokens[-longest:] for prompt in make_prompts(rank).take(count)],
        added,
        max_diff=config.checks.max_logprob_diff,
        always=config.checks.probe == "always" or config.rollout.max_staleness > 0,
        is_moe=rank.shape.is_moe,
        **options,
    )
