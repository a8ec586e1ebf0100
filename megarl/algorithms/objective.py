"""The objective as configured: rewards become advantages once a batch, log-probs become losses in every micro-batch.

`add_advantages` runs on the whole batch (the same on every rank); `token_losses` runs on whole rows, under
autograd; `loss_weights` says what each token's loss weighs in its update, so sums over micro-batches and ranks
are the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.aggregation import WEIGHTS
from megarl.algorithms.corrections import CORRECTIONS
from megarl.algorithms.kl import KL, LOG_RATIO_LIMIT, adapt
from megarl.algorithms.losses import CLIPPED, LOSSES
from megarl.algorithms.rows import Rows, clean
from megarl.algorithms.selection import SELECT
from megarl.algorithms.whitening import Stats, whiten_stats
from megarl.config.names import CLIPS
from megarl.config.schema import Algorithm, KlTerm
from megarl.types import LogProbs, MicrobatchPlan, ObjectiveState, ScoredBatch, TrainBatch

__all__ = [
    "LossInputs", "TokenLosses", "add_advantages", "initial_state", "loss_weights", "select_tokens", "supervised",
    "token_losses", "token_means",
]  # fmt: skip


def initial_state(algorithm: Algorithm) -> ObjectiveState:
    """What a run starts from when it resumes nothing."""
    return ObjectiveState(kl_coef=algorithm.kl.coef)


def add_advantages(
    batch: TrainBatch, logprobs: LogProbs, algorithm: Algorithm, state: ObjectiveState
) -> tuple[ScoredBatch, ObjectiveState]:
    """Clip the outcome rewards, normalise them, subtract KL where it belongs to the reward, estimate advantages: in
    that order (overlong shaping comes before all of it, in `megarl.rollout.reward_shaping`).

    The state that comes back is the next batch's: this one is weighed with the coefficient that came in.
    """
    kl = algorithm.kl
    old_T = _engines_logprobs(batch, logprobs.old) if algorithm.use_rollout_logprobs else logprobs.old
    rewards_N, baseline_N, stats = _outcomes(batch, algorithm, Stats(*state.reward_stats))
    rewards_T = _with_outcomes(batch, rewards_N)
    kl_coef = state.kl_coef
    if algorithm.needs_reference:
        assert logprobs.ref is not None, "a KL term without reference log-probs"
        at = clean(old_T, batch.mask), clean(logprobs.ref, batch.mask)
        if kl.where == "reward":
            rewards_T = rewards_T - state.kl_coef * _kl(*at, kl).detach()
        if kl.target is not None:
            kl_coef = _adapted(KL["k3"](*at), batch, kl, state.kl_coef)
    advantages_T = ADVANTAGES[algorithm.advantage](
        rewards_T,
        batch.mask,
        batch.cu_seqlens,
        batch.group,
        step_ends_T=batch.step_ends,
        baseline_N=baseline_N,
        **algorithm.advantage_options,
    )
    scored = ScoredBatch(
        **_fields(batch),
        advantages=advantages_T,
        old_logprobs=old_T,
        ref_logprobs=logprobs.ref,
        kl_coef=state.kl_coef,
    )
    return scored, ObjectiveState(kl_coef, (stats.n, stats.mean, stats.m2))


def supervised(batch: TrainBatch, logprobs: LogProbs) -> ScoredBatch:
    """A batch of reference answers, for the loss `sft`: nothing was sampled, so the engine's log-probs are the
    trainer's own and no correction or clip can act."""
    same = {**_fields(batch), "rollout_logprobs": logprobs.old}  # nothing was sampled
    ones_T = batch.mask.to(torch.float32)
    return ScoredBatch(**same, advantages=ones_T, old_logprobs=logprobs.old, ref_logprobs=logprobs.ref, kl_coef=0.0)


def _fields(batch: TrainBatch) -> dict[str, Any]:
    return {field.name: getattr(batch, field.name) for field in fields(TrainBatch)}


def _engines_logprobs(batch: TrainBatch, old_T: Tensor) -> Tensor:
    """What the engine said, the trainer's own where it said nothing."""
    return torch.where(batch.mask & batch.rollout_logprobs.isfinite(), batch.rollout_logprobs, old_T)


def _outcomes(batch: TrainBatch, algorithm: Algorithm, seen: Stats) -> tuple[Tensor, Tensor, Stats]:
    """(rewards [N], baseline [N], statistics of all outcome rewards so far, this batch's among them).

    Both are treated alike, so that a greedy sample's reward stays comparable.
    """

    bounds, clip_stage = algorithm.reward_clip, algorithm.reward_clip_stage

    def clipped(x_N: Tensor, stage: str) -> Tensor:
        return x_N.clamp(*bounds) if bounds is not None and stage == clip_stage else x_N

    rewards_N, baseline_N = (clipped(x_N.double(), "raw") for x_N in (batch.rewards, batch.baseline))
    if algorithm.normalise_rewards:
        seen = seen.merge(whiten_stats(rewards_N, (batch.outcome_at >= 0) & rewards_N.isfinite()))
        scale = (seen.variance() + 1e-8) ** -0.5 if seen.variance() else 1.0
        rewards_N, baseline_N = ((x_N - seen.mean) * scale for x_N in (rewards_N, baseline_N))
    return clipped(rewards_N, "normalised").float(), clipped(baseline_N, "normalised").float(), seen


def _with_outcomes(batch: TrainBatch, rewards_N: Tensor) -> Tensor:
    """`token_rewards` with each row's outcome replaced; a process step that ends there too keeps its part."""
    at, has_N = batch.outcome_at[batch.outcome_at >= 0], batch.outcome_at >= 0
    step_N = batch.token_rewards[at] - batch.rewards[has_N]  # exactly 0 without such a step, however large the reward
    return batch.token_rewards.index_put((at,), step_N + rewards_N[has_N])


def _kl(new_T: Tensor, ref_T: Tensor, term: KlTerm) -> Tensor:
    """The configured estimator of KL(new || ref), of clean inputs."""
    if term.estimator == "k3+":  # a clamp of its value must leave its gradient
        return KL["k3+"](new_T, ref_T, value_clamp=term.value_clamp)
    value_T = KL[term.estimator](new_T, ref_T)
    return value_T if term.value_clamp is None else value_T.clamp(-term.value_clamp, term.value_clamp)


def _kl_loss(new_T: Tensor, old_T: Tensor, ref_T: Tensor, term: KlTerm) -> Tensor:
    """The KL term of the loss, before its coefficient.

    With `importance_weighted`, times pi / pi_old, as the samples are the old policy's. The ratio carries gradient for
    the estimators whose value is unbiased; k2 and k3+ have the gradient of KL already.
    """
    kl_T = _kl(new_T, ref_T, term)
    if not term.importance_weighted:
        return kl_T
    ratio_T = (new_T - old_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return kl_T * (ratio_T.detach() if term.estimator in ("k2", "k3+") else ratio_T)


def _adapted(kl_T: Tensor, batch: TrainBatch, term: KlTerm, coef: float) -> float:
    """The next batch's coefficient, from the mean over rows of their mean k3 a token, whatever the estimator: it is
    never negative, and is what `kl/ref` shows."""
    rows = Rows.of(batch.mask, batch.cu_seqlens)
    trained_N = rows.num_tokens_N > 0
    if term.target is None or not trained_N.any():
        return coef
    mean = float(rows.mean(kl_T.double())[trained_N].mean())
    return adapt(coef, mean, target=term.target, horizon=term.horizon, num_samples=int(trained_N.sum()))


def select_tokens(
    batch: ScoredBatch, logprobs_T: Tensor, rows: Sequence[int], algorithm: Algorithm, seed: int
) -> Tensor:
    """[T] bool: the tokens that clip_cov and kl_cov treat apart in the update of `rows`; none for any other loss.

    `logprobs_T` are those of the policy as this update finds it. The same on every rank, as they draw alike.
    """
    if algorithm.loss not in SELECT:
        return torch.zeros_like(batch.mask)
    chosen_N = torch.zeros(batch.num_rows, dtype=torch.bool)
    chosen_N[list(rows)] = True
    mask_T = batch.mask & chosen_N.repeat_interleave(batch.cu_seqlens.diff())
    options = dict(algorithm.token_selection_options)
    if algorithm.loss == "clip_cov":
        options |= {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    generator = torch.Generator().manual_seed(seed)
    return SELECT[algorithm.loss](
        logprobs_T, batch.old_logprobs, batch.advantages, mask_T, generator=generator, **options
    )


def loss_weights(
    batch: ScoredBatch, plan: MicrobatchPlan, *, aggregation: str, constant: float | None = None
) -> Tensor:
    """[T] fp64: each token's weight in the loss of the update its row belongs to; 0 where it is not trained.

    A micro-batch's loss is ``(loss_T * weights_T).sum()`` over its rows; summed over the micro-batches and data
    parallel ranks of an update that is the whole loss. `constant` is the response budget (Dr. GRPO's divisor).
    """
    lengths_N = batch.cu_seqlens.diff()
    weights_T = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for update in plan.rows:
        chosen_N = torch.zeros(batch.num_rows, dtype=torch.bool)
        chosen_N[[row for rank in update for rows in rank for row in rows]] = True
        mask_T = batch.mask & chosen_N.repeat_interleave(lengths_N)
        weights_T += WEIGHTS[aggregation](mask_T, batch.cu_seqlens, batch.group, constant=constant)
    return weights_T


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The rows of one micro-batch, on the device: M positions, whole rows end to end, as in ScoredBatch."""

    old_logprobs: Tensor  # [M] fp32
    ref_logprobs: Tensor | None  # [M] fp32
    rollout_logprobs: Tensor  # [M] fp32
    advantages: Tensor  # [M] fp32
    mask: Tensor  # [M] bool
    cu_seqlens: Tensor  # [rows + 1] int64
    select: Tensor  # [M] bool: what SELECT chose of them
    kl_coef: float


@dataclass(frozen=True, slots=True)
class TokenLosses:
    loss: Tensor  # [M] with gradient, unweighted, 0 where the mask is False
    sums: dict[str, Tensor]  # name -> 0-d fp64, a sum over trained tokens; / the update's token count = the metric


def token_losses(logprobs_T: Tensor, entropy_T: Tensor | None, inputs: LossInputs, algorithm: Algorithm) -> TokenLosses:
    """Policy loss x correction weight, plus coef x KL, minus coef x entropy, for each token of whole rows.

    `logprobs_T` [M] carries the gradient; `entropy_T` [M] needs to only where `algorithm.entropy_coef` is not 0.
    """
    mask_T = inputs.mask
    at = (logprobs_T, inputs.old_logprobs, inputs.advantages, mask_T, inputs.cu_seqlens)
    options = loss_options(algorithm)
    selected = {"select_T": inputs.select} if algorithm.loss in SELECT else {}
    weights_T, sums = _correction(logprobs_T, inputs, algorithm)
    loss_T = LOSSES[algorithm.loss](*at, **options, **selected) * weights_T
    new_T, old_T, rollout_T = (clean(x_T, mask_T) for x_T in (logprobs_T, inputs.old_logprobs, inputs.rollout_logprobs))
    sums |= {
        "kl/rollout": KL["k3"](rollout_T, old_T),  # sampled by the engine: KL(engine || trainer)
        "kl/old": KL["k3"](old_T, new_T.detach()),
        "clip_frac": CLIPPED[algorithm.loss](*at, **options) if algorithm.loss in CLIPPED else torch.zeros_like(new_T),
    }
    if algorithm.needs_reference:
        assert inputs.ref_logprobs is not None, "a KL term without reference log-probs"
        ref_T = clean(inputs.ref_logprobs, mask_T)
        sums["kl/ref"] = KL["k3"](new_T.detach(), ref_T)
        if algorithm.kl.where == "loss":
            loss_T = loss_T + inputs.kl_coef * _kl_loss(new_T, old_T, ref_T, algorithm.kl)
    if entropy_T is not None:
        sums["entropy"] = clean(entropy_T, mask_T)
        if algorithm.entropy_coef:
            loss_T = loss_T - algorithm.entropy_coef * sums["entropy"]
    return TokenLosses(loss_T, {name: x_T.detach().double().sum() for name, x_T in sums.items()})


def _correction(logprobs_T: Tensor, inputs: LossInputs, algorithm: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
    """([M] weights, what is told of them): the plain importance weights too, whose spread is the sample's worth."""
    at = (inputs.old_logprobs, inputs.rollout_logprobs, inputs.mask, inputs.cu_seqlens)
    name = algorithm.correction
    weights_T = CORRECTIONS[name](
        *at, logprobs_T=logprobs_T, advantages_T=inputs.advantages, **algorithm.correction_options
    )
    plain_T = CORRECTIONS["seq_tis" if name == "seq_tis" else "tis"](*at, cap=float("inf"))
    truncates = name in ("tis", "seq_tis", "icepop")
    changed_T = (weights_T != plain_T) if truncates else inputs.mask & (weights_T == 0)
    return weights_T, {
        "correction/weight": weights_T,
        "correction/clipped": changed_T,
        "correction/plain": plain_T,
        "correction/plain_squared": plain_T.double().square(),
    }


def token_means(sums: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    """What an update tells, from sums over its tokens. correction/ess: the share of the samples that the engine's
    would be worth under plain importance weights, (sum w)^2 / (n sum w^2)."""
    means = {name: total / max(1, num_tokens) for name, total in sums.items()}
    plain, squared = means.pop("correction/plain", 0.0), means.pop("correction/plain_squared", 0.0)
    return means | ({"correction/ess": plain**2 / squared} if squared else {})


def loss_options(algorithm: Algorithm) -> dict[str, Any]:
    """`loss_options`, and those of clip_low, clip_high and dual_clip that the loss has."""
    return {name: getattr(algorithm, name) for name in CLIPS.get(algorithm.loss, ())} | algorithm.loss_options
