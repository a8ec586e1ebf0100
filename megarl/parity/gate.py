"""Compares trainer and engine: on a probe before a version commits, and on every batch before its
update.

Both are bounded by what rounding explains for this model on these tokens, unless
checks.max_logprob_diff sets a bound.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from megarl.data.collate import AnyBatch, take_rows, token_batch
from megarl.parity.statistics import (
    FORMAT_EPS,
    LOG_SOFTMAX_ERROR,
    Excess,
    Parity,
    Quantiles,
    compare,
    explain,
    rounding_floor,
)
from megarl.parity.sublayers import rounding_errors
from megarl.roles import Engine
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, ScoredBatch, TokenBatch, TrainBatch
from megarl.weights.encode.blocks import BlockEncoder
from megarl.weights.sync.transports import Transport

PROBE_PROMPTS = 8
MOE_PROBE_PROMPTS = 32
PROBE_TOKENS = 32  # that the engine adds to each
DRAWS = 4  # of rounding errors, at most
ENOUGH = 2048  # tokens in all draws
REMEASURED_EVERY = 10  # batches, at most
CAUSE_ROWS = 8


@dataclass(frozen=True)
class Measured:
    """Log-probs [K] of the tokens in the mask, and what two correct implementations differ by."""

    logprobs_K: Tensor  # with the engine's weights, if it quantises them
    floor: Quantiles
    of_policy: Quantiles  # the floor under the trained weights, which the engine may quantise


def rounding_of(trainer: Trainer, encoder: BlockEncoder | None = None) -> float:
    """Returns the relative rounding error of a sublayer's output.

    `encoder`: of the engine's weights, whose format on a GPU the activations that they multiply
    have too.
    """
    is_cuda = trainer.device.type == "cuda"
    if trainer.precision.recipe or (encoder and is_cuda):
        return FORMAT_EPS["e4m3"]
    if is_cuda and trainer.train.dtype == "fp32":
        return FORMAT_EPS["tf32"]
    return FORMAT_EPS[trainer.train.dtype]


def sampled_rows(
    batch: AnyBatch, count: int | None = None, *, first: int | None = None
) -> AnyBatch:
    """Returns the rows that have sampled tokens, at most `count`; row `first` before others."""
    masks = batch.mask.split(batch.lengths_N.tolist())
    rows = [row for row, mask_L in enumerate(masks) if mask_L.any()]
    return take_rows(batch, sorted(rows, key=lambda row: row != first)[:count])


def difference(batch: TrainBatch, logprobs_K: Tensor) -> Quantiles:
    """Compares log-probs of the tokens in the mask with those that the engine sampled them with."""
    return Quantiles.of(logprobs_K - batch.rollout_logprobs[batch.mask])


def measure_logprobs(
    trainer: Trainer, batch: TokenBatch, encoder: BlockEncoder | None = None
) -> Measured:
    """Measures log-probs and their floor on the trainer's ranks. A collective.

    It takes one forward pass, and up to DRAWS more with rounding errors; with an encoder, under
    the weights that the engine has, after one more under those that are trained.
    """
    eps = rounding_of(trainer, encoder)
    trained_K = trainer.logprobs(batch)[batch.mask]
    noise = []
    with as_in_engine(trainer, encoder):
        seen_K = trained_K if encoder is None else trainer.logprobs(batch)[batch.mask]
        for draw in range(min(DRAWS, ceil(ENOUGH / max(1, len(seen_K))))):
            with rounding_errors(trainer, eps, draw=draw):
                noise.append(trainer.logprobs(batch)[batch.mask] - seen_K)
    noise_DK = torch.stack(noise)
    policy_DK = noise_DK + (seen_K - trained_K) / 2**0.5  # the floor doubles the variance
    return Measured(
        seen_K,
        floor=rounding_floor(seen_K, noise_DK, error=LOG_SOFTMAX_ERROR),
        of_policy=rounding_floor(seen_K, policy_DK, error=LOG_SOFTMAX_ERROR),
    )


def as_in_engine(trainer: Trainer, encoder: BlockEncoder | None) -> AbstractContextManager[None]:
    """Rounds the trainer's weights through the engine's format in its context."""
    if encoder is None:
        return nullcontext()
    return encoder.applied(trainer.parameters_by_name())


@dataclass
class ParityChecks:
    """publish.Probe; `parity` is a roles.Gate."""

    transport: Transport
    measure: Callable[[TokenBatch], Measured]  # the trainer's side
    # this rank's; split: all replicas, which complete and score, or none where only the gate is
    engines: Sequence[Engine] = ()
    prompts: Sequence[Sequence[int]] = ()  # of the probe, as token ids; the same on every rank
    max_tokens: int = PROBE_TOKENS
    # bound on any token's difference, in nats; None: what rounding explains
    max_diff: float | None = None
    always: bool = False
    is_moe: bool = False
    follows_engine: bool = False  # the trainer takes the choices of rank 0's engine
    find: Callable[..., str | None] | None = None  # parity.cause.CauseSearch.find
    floor: Quantiles | None = None  # of the policy's tokens, as last measured
    floor_age: int = REMEASURED_EVERY  # batches since, or many
    # of the weights last published; None: all tokens have it
    version: Callable[[], int | None] = lambda: None

    def check(self) -> None:
        """publish.Probe."""
        batch, found = self.probe()
        worst = max(found, key=lambda excess: (excess.statistic, excess.found.max))
        if self._is_within(worst, worst.found.max):
            return
        cause = self.find and self.find(batch, worst.floor)
        found_cause = f"; cause: {cause}" if cause else ""
        raise CheckFailed(
            f"after the weight sync the engine's log-probs differ from the trainer's by up to "
            f"{worst.found.max:.3g}, although every byte arrived: it repacks weights incorrectly "
            f"or computes something else; {self._bound(worst)}{found_cause}"
        )

    def probe(self) -> tuple[TokenBatch, list[Excess]]:
        """Returns the rows and the comparison with each rank of the engine. A collective.

        The engine continues the prompts, so that the tokens are likely ones: in the tail of the
        distribution, where random tokens lie, low precision is at its worst. Both sides score them
        at temperature 1.
        """
        lengths = [len(prompt) + self.max_tokens for prompt in self.prompts]
        completed = self.engines[0].complete(self.prompts, max_tokens=self.max_tokens)
        rows = self.transport.gather(torch.cat(completed))[0].split(lengths)
        is_new = [torch.arange(length) >= length - self.max_tokens for length in lengths]
        batch = token_batch(list(zip(rows, is_new, strict=True)), temperature=1.0)
        if self.follows_engine:
            engine: Any = self.engines[0]  # in this process
            scores, choices = engine.score_with_choices(rows)
            all_scores = [scores]
            batch = replace(batch, choices=self.transport.gather(choices)[0])
        else:
            all_scores = [engine.score(rows) for engine in self.engines]
        measured = self.measure(batch)
        of_rank = (measured.floor, measured.of_policy, measured.logprobs_K)
        floor, self.floor, logprobs_K = self.transport.gather(of_rank)[0]
        found = []
        for scores in all_scores:
            scores_K = torch.cat([score[-self.max_tokens :] for score in scores])
            found += self.transport.gather(Quantiles.of(logprobs_K - scores_K))
        return batch, [self.excess(each, floor, prompts=len(rows)) for each in found]

    def judge(self, batch: TrainBatch) -> Excess:
        """Compares sampled tokens with the trainer's log-probs, measured anew. A collective."""
        measured = self.measure(batch)
        found = difference(batch, measured.logprobs_K)
        return self.excess(found, measured.floor, prompts=batch.prompt_id.unique().numel())

    def cause(self, batch: TrainBatch, first: int | None = None) -> str | None:
        """Searches the cause of a difference on a few rows, row `first` before others."""
        assert self.find is not None
        few = sampled_rows(batch, CAUSE_ROWS, first=first)
        return self.find(few, self.measure(few).floor, few.rollout_logprobs)

    def excess(self, found: Quantiles, floor: Quantiles, *, prompts: int) -> Excess:
        """Returns the difference over the floor.

        With experts, only prompts are independent: a token that is routed elsewhere moves all that
        follow it.
        """
        return Excess(found, floor, prompts if self.is_moe else None)

    def parity(self, batch: ScoredBatch) -> dict[str, float]:
        """Compares the tokens just sampled (roles.Gate).

        All ranks have the batch, and refuse together.

        Tokens of older weights, from which the trainer has moved on, are not judged; without
        others, the last probe was the judge. The floor is an earlier batch's; it is measured again
        before a refusal and, at most every REMEASURED_EVERY batches, where more than half of the
        limit is used up.
        """
        if not self.follows_engine:  # choices that the trainer has recorded are not the engine's
            batch = replace(batch, choices=())
        version = self.version()
        is_fresh_T = batch.mask & (batch.versions == version)
        if version is not None and not is_fresh_T.equal(batch.mask):
            batch = sampled_rows(replace(batch, mask=is_fresh_T))
            if not batch.num_rows:
                return {}
        parity = compare(batch)
        assert batch.old_logprobs is not None
        found = difference(batch, batch.old_logprobs[batch.mask])
        floor = self.floor or self._remeasured(batch)
        excess = self.excess(found, floor, prompts=batch.prompt_id.unique().numel())
        self.floor_age += 1
        is_doubtful = excess.statistic > excess.limit / 2 and self.floor_age > REMEASURED_EVERY
        if self.max_diff is None and (is_doubtful or not excess.is_explained):
            excess = replace(excess, floor=self._remeasured(batch))
        if self._is_within(excess, parity.max):
            return {
                "logprob_diff/mean": parity.mean,
                "logprob_diff/max": parity.max,
                "kl/rollout": parity.kl,
                "logprob_diff/statistic": excess.statistic,
                "logprob_diff/limit": excess.limit,
            }
        raise CheckFailed(
            f"log-probs of trainer and engine differ by {parity.max:.3g} at most and "
            f"{parity.mean:.3g} on average ({self._bound(excess)}); worst: row {parity.row}, "
            f"sampled token {parity.position}, trainer {parity.trainer:.6g}, "
            f"engine {parity.engine:.6g}; {self._cause(batch, parity)}. "
            "Nothing was updated; set checks.max_logprob_diff only if you know why they differ"
        )

    def _is_within(self, excess: Excess, largest: float) -> bool:
        return excess.is_explained if self.max_diff is None else largest <= self.max_diff

    def _cause(self, batch: ScoredBatch, parity: Parity) -> str:
        """Finds the cause on the first rows, or guesses it where the engine cannot compute."""
        guess = explain(parity, is_moe=self.is_moe, temperature=batch.temperature)
        if self.find is None or any(self.transport.gather(self.engines[0].is_asleep)):
            return f"{guess}; `megarl check --parity` looks for the cause"
        return f"cause: {self.cause(batch, first=parity.row) or guess}"

    def _bound(self, excess: Excess) -> str:
        if self.max_diff is None:
            return str(excess)
        return f"checks.max_logprob_diff={self.max_diff:g}"

    def _remeasured(self, batch: ScoredBatch) -> Quantiles:
        self.floor = self.measure(batch).of_policy
        self.floor_age = 0
        return self.floor
