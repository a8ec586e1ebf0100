"""Compares trainer and engine: on a probe before a version commits, and on every batch before its
update.

The bound is what rounding explains for this model on these tokens, unless checks.max_logprob_diff
sets one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from megarl.trainer.heads import VocabularyHead
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, ScoredBatch, TokenBatch, TrainBatch
from megarl.weights.encode.blocks import BlockEncoder
from megarl.weights.sync.transports import Transport

PROBE_PROMPTS = 8
MOE_PROBE_PROMPTS = 32
PROBE_TOKENS = 32  # tokens that the engine generates for each prompt
DRAWS = 4  # maximum number of forward passes with rounding errors
ENOUGH = 2048  # number of tokens, over all draws, that suffices
REMEASURED_EVERY = 10  # batches before the floor is measured again, except before a refusal
CAUSE_ROWS = 8


@dataclass(frozen=True)
class Measured:
    """Log-probs [K] of tokens in the mask, and the differences between correct implementations."""

    logprobs_K: Tensor  # under quantised weights, if the engine quantises them
    floor: Quantiles
    of_policy: Quantiles  # floor between the trained weights and the engine's quantised ones


def rounding_of(trainer: Trainer, encoder: BlockEncoder | None = None) -> float:
    """Returns the relative rounding error of a sublayer's output.

    `encoder` quantises the engine's weights; on a GPU, the activations that they multiply have the
    same format.
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
    """Returns rows that have sampled tokens, at most `count`, beginning with row `first`."""
    masks = batch.mask.split(batch.lengths_N.tolist())
    rows = [row for row, mask_L in enumerate(masks) if mask_L.any()]
    return take_rows(batch, sorted(rows, key=lambda row: row != first)[:count])


def difference(batch: TrainBatch, logprobs_K: Tensor) -> Quantiles:
    """Compares log-probs of the tokens in the mask with the engine's at sampling."""
    return Quantiles.of(logprobs_K - batch.rollout_logprobs[batch.mask])


def measure_logprobs(
    trainer: Trainer, batch: TokenBatch, encoder: BlockEncoder | None = None
) -> Measured:
    """Measures log-probs and their floor on the trainer's ranks. Collective.

    It runs one forward pass, and up to DRAWS more with rounding errors. With an encoder, these use
    the quantised weights, and one pass before them uses the trained weights.
    """
    eps = rounding_of(trainer, encoder)
    trained_K = trainer.logprobs(batch)[batch.mask]
    noise = []
    with as_in_engine(trainer, encoder):
        seen_K = trained_K if encoder is None else trainer.logprobs(batch)[batch.mask]
        for draw in range(min(DRAWS, ceil(ENOUGH / max(1, len(seen_K))))):
            with rounding_errors(trainer, eps, draw=draw), engine_logits(trainer):
                noise.append(trainer.logprobs(batch)[batch.mask] - seen_K)
    noise_DK = torch.stack(noise)
    policy_DK = noise_DK + (seen_K - trained_K) / 2**0.5  # rounding_floor doubles the variance
    return Measured(
        seen_K,
        floor=rounding_floor(seen_K, noise_DK, error=LOG_SOFTMAX_ERROR),
        of_policy=rounding_floor(seen_K, policy_DK, error=LOG_SOFTMAX_ERROR),
    )


def as_in_engine(trainer: Trainer, encoder: BlockEncoder | None) -> AbstractContextManager[None]:
    """Context: rounds the trainer's weights through the engine's format."""
    if encoder is None:
        return nullcontext()
    return encoder.applied(trainer.parameters_by_name())


@contextmanager
def engine_logits(trainer: Trainer) -> Iterator[None]:
    """Context: in bf16, adds the rounding error of the engine's logits to the trainer's.

    vLLM's output layer returns logits in bf16, whatever its sampler converts them to; the trainer's
    are fp32. Only one side rounds them, but `rounding_floor` doubles the variance.
    """
    head = trainer.head
    if isinstance(head, VocabularyHead) and trainer.train.dtype == "bf16":
        trainer.head = replace(head, rounding=2**-0.5)
    try:
        yield
    finally:
        trainer.head = head


@dataclass
class ParityChecks:
    """publish.Probe of weight syncs; the method `parity` is the roles.Gate of updates."""

    transport: Transport
    measure: Callable[[TokenBatch], Measured]  # measures the trainer's log-probs
    # this rank's; in split mode all replicas, or none in a process that only runs the gate
    engines: Sequence[Engine] = ()
    prompts: Sequence[Sequence[int]] = ()  # token ids of the probe; the same on every rank
    max_tokens: int = PROBE_TOKENS
    # bound on any token's difference, in nats; None: the floor decides
    max_diff: float | None = None
    always: bool = False
    is_moe: bool = False
    follows_engine: bool = False  # the trainer replays the choices of rank 0's engine
    find: Callable[..., str | None] | None = None  # parity.cause.CauseSearch.find
    floor: Quantiles | None = None  # the last measured `of_policy`
    floor_age: int = REMEASURED_EVERY  # batches since that measurement
    # version of the weights last published; None: all tokens were sampled by these
    version: Callable[[], int | None] = lambda: None

    def check(self) -> None:
        """Raises CheckFailed if trainer and engine differ on the probe by more than the bound."""
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
        """Returns the probe's rows, and the comparison with each rank of the engine. Collective.

        The engine completes the prompts, so that the tokens are likely ones. Random tokens lie in
        the tail of the distribution, where low precision is worst. Both sides score the tokens at
        temperature 1.
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
        """Compares sampled tokens with newly measured log-probs of the trainer. Collective."""
        measured = self.measure(batch)
        found = difference(batch, measured.logprobs_K)
        return self.excess(found, measured.floor, prompts=batch.prompt_id.unique().numel())

    def cause(self, batch: TrainBatch, first: int | None = None) -> str | None:
        """Searches for the cause of a difference on a few rows, beginning with row `first`."""
        assert self.find is not None
        few = sampled_rows(batch, CAUSE_ROWS, first=first)
        return self.find(few, self.measure(few).floor, few.rollout_logprobs)

    def excess(self, found: Quantiles, floor: Quantiles, *, prompts: int) -> Excess:
        """Returns the difference over the floor.

        With experts, only prompts are independent: a token that is routed to other experts changes
        all later tokens.
        """
        return Excess(found, floor, prompts if self.is_moe else None)

    def parity(self, batch: ScoredBatch) -> dict[str, float]:
        """Compares the tokens just sampled with the trainer's log-probs; a roles.Gate.

        Returns metrics. Raises CheckFailed if they differ by more than the bound; all ranks have
        the batch, and raise together.

        Tokens sampled by older weights are ignored; if there are no others, nothing is compared,
        and the last probe has to suffice. The floor is an earlier batch's. It is measured again
        before a refusal, and if the statistic exceeds half of the limit, but then at most every
        REMEASURED_EVERY batches.
        """
        if not self.follows_engine:  # the trainer recorded these choices, not the engine
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
        """Returns the cause found on a few rows, or a guess if the engine cannot compute."""
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
