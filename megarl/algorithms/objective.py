"""The objective as configured: rewards become advantages once a batch, log-probs become losses in every micro-batch.

`add_advantages` runs on the whole batch (the same on every rank); `token_losses` runs on whole rows, under
autograd; `loss_weights` says what each token's loss weighs in its update, so sums over micro-batches and ranks
are the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.corrections import CORRECTIONS
from megarl.algorithms.kl import KL
from megarl.algorithms.losses import CLIPPED, LOSSES
from megarl.algorithms.reduce import WEIGHTS
from megarl.algorithms.segments import clean
from megarl.config.schema import Algorithm
from megarl.types import LogProbs, MicrobatchPlan, ObjectiveState, ScoredBatch, TrainBatch

__all__ = ["LossInputs", "TokenLosses", "add_advantages", "initial_state", "loss_weights", "supervised", "token_losses"]

PPO_CLIPPED = ("ppo_clip", "clip_cov")  # the losses that `algorithm.clip_low` and its like are about


def initial_state(algorithm: Algorithm) -> ObjectiveState:
    """What a run starts from when it resumes nothing."""
    return ObjectiveState(kl_coef=algorithm.kl.coef)


def add_advantages(
    batch: TrainBatch, logprobs: LogProbs, algorithm: Algorithm, state: ObjectiveState
) -> tuple[ScoredBatch, ObjectiveState]:
    """Clip the outcome rewards, subtract KL where it belongs to the reward, estimate advantages: in that order."""
    rewards_T = _clipped_rewards(batch, algorithm.reward_clip)
    if algorithm.needs_reference and algorithm.kl.where == "reward":
        assert logprobs.ref is not None, "KL in the reward without reference log-probs"
        kl_T = KL[algorithm.kl.estimator](clean(logprobs.old, batch.mask), clean(logprobs.ref, batch.mask))
        rewards_T = rewards_T - state.kl_coef * kl_T.detach()
    advantages_T = ADVANTAGES[algorithm.advantage](
        rewards_T,
        batch.mask,
        batch.cu_seqlens,
        batch.group,
        step_ends_T=batch.step_ends,
        baseline_N=batch.baseline,
        **algorithm.advantage_options,
    )
    scored = ScoredBatch(
        **_fields(batch), advantages=advantages_T, old_logprobs=logprobs.old, ref_logprobs=logprobs.ref
    )
    return scored, state


def supervised(batch: TrainBatch, logprobs: LogProbs) -> ScoredBatch:
    """A batch of reference answers, for the loss `sft`: nothing was sampled, so the engine's log-probs are the
    trainer's own and no correction or clip can act."""
    same = {**_fields(batch), "rollout_logprobs": logprobs.old}  # nothing was sampled
    ones_T = batch.mask.to(torch.float32)
    return ScoredBatch(**same, advantages=ones_T, old_logprobs=logprobs.old, ref_logprobs=logprobs.ref)


def _fields(batch: TrainBatch) -> dict[str, Any]:
    return {field.name: getattr(batch, field.name) for field in fields(TrainBatch)}


def _clipped_rewards(batch: TrainBatch, bounds: tuple[float, float] | None) -> Tensor:
    """`token_rewards` with each row's outcome reward, which sits on its last True position, clipped."""
    if bounds is None:
        return batch.token_rewards
    positions_T = torch.arange(batch.num_tokens)
    rewards_T = batch.token_rewards.clone()
    for row, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        trained = positions_T[start:end][batch.mask[start:end]]
        if trained.numel():
            rewards_T[trained[-1]] += batch.rewards[row].clamp(*bounds) - batch.rewards[row]
    return rewards_T


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


@dataclass(frozen=True, slots=True)
class TokenLosses:
    loss: Tensor  # [M] with gradient, unweighted, 0 where the mask is False
    sums: dict[str, Tensor]  # name -> 0-d fp64, a sum over trained tokens; / the update's token count = the metric


def token_losses(logprobs_T: Tensor, entropy_T: Tensor | None, inputs: LossInputs, algorithm: Algorithm) -> TokenLosses:
    """Policy loss x correction weight, plus coef x KL, minus coef x entropy, for each token of whole rows.

    `logprobs_T` [M] carries the gradient; `entropy_T` [M] needs to only where `algorithm.entropy_coef` is not 0.
    """
    mask_T, old_T, advantages_T = inputs.mask, inputs.old_logprobs, inputs.advantages
    at = (logprobs_T, old_T, advantages_T, mask_T, inputs.cu_seqlens)
    options = loss_options(algorithm)
    loss_T = LOSSES[algorithm.loss](*at, **options)
    weights_T = CORRECTIONS[algorithm.correction](
        old_T,
        inputs.rollout_logprobs,
        mask_T,
        inputs.cu_seqlens,
        logprobs_T=logprobs_T,
        advantages_T=advantages_T,
        **algorithm.correction_options,
    )
    loss_T = loss_T * weights_T
    new_T, old_T, rollout_T = (clean(x_T, mask_T) for x_T in (logprobs_T, old_T, inputs.rollout_logprobs))
    sums = {
        "kl/rollout": KL["k3"](rollout_T, old_T),  # sampled by the engine: KL(engine || trainer)
        "kl/old": KL["k3"](old_T, new_T.detach()),
        "correction/weight": weights_T,
        "clip_frac": CLIPPED[algorithm.loss](*at, **options) if algorithm.loss in CLIPPED else torch.zeros_like(new_T),
    }
    if algorithm.needs_reference:
        assert inputs.ref_logprobs is not None, "a KL term without reference log-probs"
        ref_T = clean(inputs.ref_logprobs, mask_T)
        sums["kl/ref"] = KL["k3"](new_T.detach(), ref_T)
        if algorithm.kl.where == "loss":
            loss_T = loss_T + algorithm.kl.coef * KL[algorithm.kl.estimator](new_T, ref_T)
    if entropy_T is not None:
        sums["entropy"] = clean(entropy_T, mask_T)
        if algorithm.entropy_coef:
            loss_T = loss_T - algorithm.entropy_coef * sums["entropy"]
    return TokenLosses(loss_T, {name: x_T.detach().double().sum() for name, x_T in sums.items()})


def loss_options(algorithm: Algorithm) -> dict[str, Any]:
    """`loss_options`, under them clip_low, clip_high and dual_clip for PPO's clip.

    The bounds of the other losses bound other quantities (GSPO's a row's mean ratio): they keep their own defaults.
    """
    if algorithm.loss not in PPO_CLIPPED:
        return dict(algorithm.loss_options)
    takes = signature(LOSSES[algorithm.loss].args[0]).parameters
    clips = {name: getattr(algorithm, name) for name in ("clip_low", "clip_high", "dual_clip") if name in takes}
    return clips | algorithm.loss_options
