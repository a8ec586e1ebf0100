"""The objective of a policy: rewards become advantages once per batch, log-probs become losses in
every micro-batch.

    batch, log-probs --advantages--> ScoredBatch     once a step, on the whole batch, on every rank
    ScoredBatch      --weights-->    [T]             each token's share of its update's loss
    outputs, rows    --loss-->       TokenLosses     on whole rows, under autograd

T = tokens of the batch, M = tokens of one micro-batch, N = rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import nan

import torch
from torch import Tensor

from megarl.algorithms.advantages import ADVANTAGES, PER_ROW, returns
from megarl.algorithms.aggregation import token_weights
from megarl.algorithms.corrections import correction_weights
from megarl.algorithms.critic import value_after_cut
from megarl.algorithms.kl import KL, LOG_RATIO_LIMIT, adapted, likelihood_ratio, teacher_divergence
from megarl.algorithms.losses import SELECT, Tokens, loss_and_clip
from megarl.algorithms.rows import Rows, clean
from megarl.algorithms.whitening import Stats, whiten_stats
from megarl.config.schema import Algorithm, KlTerm
from megarl.types import (
    Loss,
    MicrobatchPlan,
    MicrobatchRows,
    ObjectiveState,
    ScoredBatch,
    StepReport,
    TokenBatch,
    TokenLosses,
    TokenOutputs,
    TokenScores,
    TrainBatch,
)


@dataclass(frozen=True)
class Objective:
    """The `algorithm` section of a config, as functions."""

    algorithm: Algorithm
    max_tokens: int | None = None  # response budget, the divisor of Dr. GRPO's aggregation
    value_lam: float | None = None  # GAE's lambda of the critic's targets; None: the advantages'
    # add the value after the cut to the reward of responses that were cut by length
    bootstrap_truncated: bool = False
    couples_rows = False  # True: the rows of a prompt must share a micro-batch

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.needs_reference

    def initial_state(self) -> ObjectiveState:
        return ObjectiveState(kl_coef=self.algorithm.kl.coef)

    def advantages(
        self, batch: TrainBatch, scores: TokenScores, state: ObjectiveState
    ) -> tuple[ScoredBatch, ObjectiveState]:
        """Estimates advantages from clipped and normalised outcome rewards.

        A KL penalty that is part of the reward is subtracted first. Returns the scored batch, which
        uses the KL coefficient of `state`, and the state for the next batch.
        """
        algorithm = self.algorithm
        kl = algorithm.kl
        coef = state.kl_coef
        rewards_N, baseline_N, stats = _outcomes(batch, algorithm, Stats(*state.reward_stats))
        rewards_T = _with_outcomes(batch, rewards_N)
        next_coef = coef
        if algorithm.needs_reference and self.reads_old_logprobs:
            trainer_T = scores.old_logprobs
            assert trainer_T is not None, "a KL penalty needs the trainer's earlier log-probs"
            old_T = clean(self._old(trainer_T, batch.rollout_logprobs, batch.mask), batch.mask)
            ref_T = clean(
                trainer_T if scores.ref_logprobs is None else scores.ref_logprobs, batch.mask
            )
            if kl.where == "reward":
                kl_T = KL[kl.estimator](old_T, ref_T, value_clamp=kl.value_clamp)
                rewards_T = rewards_T - coef * kl_T.detach()
            next_coef = adapted(coef, _mean_of_rows(KL["k3"](old_T, ref_T), batch), kl, batch)
        values_T = scores.old_values
        if values_T is not None and self.bootstrap_truncated:
            gamma = algorithm.advantage_options.get("gamma", 1.0)
            rewards_T = rewards_T + gamma * value_after_cut(batch, values_T)
        estimate = partial(
            ADVANTAGES[algorithm.advantage],
            rewards_T,
            batch.mask,
            batch.cu_seqlens,
            batch.group,
            values_T=values_T,
            step_ends_T=batch.step_ends,
            baseline_N=baseline_N,
            **algorithm.advantage_options,
        )
        advantages_T = estimate()
        returns_T = None
        if values_T is not None:
            values_T = clean(values_T, batch.mask)
            lam = {} if self.value_lam is None else {"lam": self.value_lam}
            returns_T = returns(estimate(whiten=False, **lam), values_T)
        known = batch.fields_of(TrainBatch) | scores.known()
        known["old_values"] = values_T
        scored = ScoredBatch(**known, advantages=advantages_T, kl_coef=coef, returns=returns_T)
        return scored, ObjectiveState(next_coef, (stats.n, stats.mean, stats.m2))

    def after_updates(
        self, batch: ScoredBatch, report: StepReport, state: ObjectiveState
    ) -> ObjectiveState:
        """Returns the state for the next batch.

        It adapts the coefficient of a KL term against the old policy to KL(old || policy) in the
        last update.
        """
        kl = self.algorithm.kl
        if kl.against != "old" or not report.updates:
            return state
        mean = report.updates[-1].metrics.get("kl/old", nan)
        return replace(state, kl_coef=adapted(state.kl_coef, mean, kl, batch))

    @property
    def reads_old_logprobs(self) -> bool:
        """True if something before the update reads the trainer's log-probs."""
        kl = self.algorithm.kl
        is_kl_read = kl.where == "reward" or kl.target is not None
        return self.selects_tokens or (self.algorithm.needs_reference and is_kl_read)

    def weights(self, batch: ScoredBatch, plan: MicrobatchPlan) -> Tensor:
        """Returns [T] fp64: each token's share of the loss of its update."""
        return loss_weights(
            batch, plan, self.algorithm.aggregation, group=batch.group, constant=self.max_tokens
        )

    @property
    def selects_tokens(self) -> bool:
        return self.algorithm.loss in SELECT

    def select(
        self, batch: ScoredBatch, logprobs_T: Tensor, plan: MicrobatchPlan, *, seed: int
    ) -> Tensor:
        """Returns [T] bool: the tokens of this update that clip_cov or kl_cov selects.

        The result is the same on every rank. `logprobs_T` are from the policy right before this
        update, `batch.old_logprobs` from before the first update.
        """
        algorithm = self.algorithm
        assert batch.old_logprobs is not None
        old_T = self._old(batch.old_logprobs, batch.rollout_logprobs, batch.mask)
        tokens = Tokens.of(
            logprobs_T, old_T, batch.advantages, trained_tokens(batch, plan), batch.cu_seqlens
        )
        return SELECT[algorithm.loss](
            tokens,
            generator=torch.Generator().manual_seed(seed),
            **algorithm.token_selection_options,
            **algorithm.loss_bounds,
        )

    def loss(self, batch: ScoredBatch, select_T: Tensor | None = None) -> Loss:
        """Returns the loss: for each token, policy loss x correction weight, plus coefficient x KL,
        minus coefficient x entropy.

        With a teacher, coefficient x (log pi_old - log pi_teacher), the gradient of KL(policy ||
        teacher) on sampled prefixes, is subtracted from each token's advantage (on-policy
        distillation, arXiv 2306.13649, 2306.08543). With `distill_top_k`, coefficient x
        `teacher_divergence` is added to the loss instead, without correction weight.
        """
        return partial(self._token_losses, batch, select_T)

    def _token_losses(
        self,
        batch: ScoredBatch,
        select_T: Tensor | None,
        outputs: TokenOutputs,
        rows: MicrobatchRows,
    ) -> TokenLosses:
        algorithm = self.algorithm
        mask_M = rows.mask
        assert outputs.logprobs_T is not None
        new_M = clean(outputs.logprobs_T, mask_M)
        rollout_M = rows.select(batch.rollout_logprobs)
        advantages_M = rows.select(batch.advantages)
        # Without a forward pass before the update, the update's own log-probs are the old ones, and
        # the ratio is 1.
        trainer_M = (
            new_M.detach()
            if batch.old_logprobs is None
            else clean(rows.select(batch.old_logprobs), mask_M)
        )
        old_M = self._old(trainer_M, rollout_M, mask_M)
        taught = {}
        if algorithm.distill_coef:
            assert batch.teacher_logprobs is not None, "distillation needs the teacher's log-probs"
            teacher_M = clean(rows.select(batch.teacher_logprobs), mask_M)
            taught = {"kl/teacher": KL["k3"](new_M.detach(), teacher_M)}
            if not algorithm.distill_top_k:
                log_ratio_M = KL["k1"](old_M, teacher_M, value_clamp=LOG_RATIO_LIMIT)
                advantages_M = advantages_M - algorithm.distill_coef * log_ratio_M
        options = algorithm.loss_bounds | algorithm.loss_options
        if select_T is not None:
            options["select_T"] = rows.select(select_T)
        tokens = Tokens.of(new_M, old_M, advantages_M, mask_M, rows.cu_seqlens)
        weights_M, sums = self._correction(tokens, rollout_M)
        loss_M, clipped_M = loss_and_clip(algorithm.loss, tokens, **options)
        loss_M = loss_M * weights_M
        sums |= taught | {"kl/old": KL["k3"](old_M, new_M.detach()), "clip_frac": clipped_M}
        ref_M = old_M
        if algorithm.needs_reference:
            ref_M = (
                trainer_M
                if batch.ref_logprobs is None
                else clean(rows.select(batch.ref_logprobs), mask_M)
            )
            sums["kl/ref"] = KL["k3"](new_M.detach(), ref_M)
        if algorithm.kl.coef and algorithm.kl.where == "loss":
            sums["kl/loss"] = batch.kl_coef * _kl_loss(new_M, old_M, ref_M, algorithm.kl)
            loss_M = loss_M + sums["kl/loss"]
        if algorithm.distill_top_k:
            assert outputs.extra_logprobs_TK is not None and batch.teacher_top_logprobs is not None
            top = outputs.extra_logprobs_TK, rows.select(batch.teacher_top_logprobs), mask_M
            sums["kl/teacher_top_k"] = teacher_divergence(*top)
            loss_M = loss_M + algorithm.distill_coef * teacher_divergence(
                *top, beta=algorithm.distill_beta
            )
        if outputs.entropy_T is not None:
            sums["entropy"] = clean(outputs.entropy_T, mask_M)
            if algorithm.entropy_coef:
                loss_M = loss_M - algorithm.entropy_coef * sums["entropy"]
        return TokenLosses(loss_M, {name: _sum(x_M) for name, x_M in sums.items()}, mask_M.sum())

    def _correction(self, tokens: Tokens, rollout_M: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns per-token correction weights [M], and the [M] tensors whose sums are reported."""
        name = self.algorithm.correction
        options = self.algorithm.correction_options
        weights_M = correction_weights(name, tokens, rollout_M, **options)
        importance = "seq_tis" if name == "seq_tis" else "tis"
        importance_M = correction_weights(importance, tokens, rollout_M, cap=torch.inf)
        truncates = name in ("tis", "seq_tis", "icepop")
        changed_M = (weights_M != importance_M) if truncates else tokens.mask_T & (weights_M == 0)
        return weights_M, {
            "correction/weight": weights_M,
            "correction/clipped": changed_M,
            "importance_weight": importance_M,
            "importance_weight_squared": importance_M.double().square(),
        }

    def metrics(self, batch: ScoredBatch, means: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics of an update, from the means of the sums that `loss` reports.

        correction/ess is the effective sample size of uncorrected importance weights, divided by n:
        (sum w)^2 / (n sum w^2).
        """
        metrics = dict(means)
        weight = metrics.pop("importance_weight", 0.0)
        squared = metrics.pop("importance_weight_squared", 0.0)
        if squared:
            metrics["correction/ess"] = weight**2 / squared
        if metrics and self.algorithm.kl.coef:
            metrics["kl/coef"] = batch.kl_coef
        return metrics

    def _old(self, trainer_T: Tensor, rollout_T: Tensor, mask_T: Tensor) -> Tensor:
        """Returns the log-probs in the denominator of ratios: the trainer's, or with
        `use_rollout_logprobs` the engine's.
        """
        if not self.algorithm.use_rollout_logprobs:
            return trainer_T
        return torch.where(mask_T & rollout_T.isfinite(), rollout_T, trainer_T)


def loss_weights(
    batch: TokenBatch,
    plan: MicrobatchPlan,
    aggregation: str = "token-mean",
    *,
    group: Tensor | None = None,
    constant: float | None = None,
) -> Tensor:
    """Returns [T] fp64: each token's share of the loss of its row's update.

    It is 0 for tokens that are not trained. `group` [N] is for aggregations over prompts;
    `constant` is the response budget of Dr. GRPO's aggregation.
    """
    weights_T = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for update in plan.updates():
        rows = Rows.of(trained_tokens(batch, update), batch.cu_seqlens)
        weights_T += token_weights(aggregation, rows, group, constant)
    return weights_T


def supervised_loss(outputs: TokenOutputs, rows: MicrobatchRows) -> TokenLosses:
    """Computes the cross-entropy of each label; a types.Loss."""
    assert outputs.logprobs_T is not None
    sums = (
        {} if outputs.entropy_T is None else {"entropy": _sum(clean(outputs.entropy_T, rows.mask))}
    )
    return TokenLosses(-clean(outputs.logprobs_T, rows.mask), sums, rows.mask.sum())


def trained_tokens(batch: TokenBatch, plan: MicrobatchPlan) -> Tensor:
    """Returns [T] bool: the tokens that the updates of `plan` train."""
    return batch.mask & planned_rows(plan, batch.num_rows).repeat_interleave(batch.lengths_N)


def planned_rows(plan: MicrobatchPlan, num_rows: int) -> Tensor:
    """Returns [N] bool: the rows that the updates of `plan` train."""
    is_planned_N = torch.zeros(num_rows, dtype=torch.bool)
    for update in plan.rows:
        for rank in update:
            is_planned_N[list(chain.from_iterable(rank))] = True
    return is_planned_N


def _sum(x_T: Tensor) -> Tensor:
    return x_T.detach().double().sum()


def _outcomes(batch: TrainBatch, algorithm: Algorithm, seen: Stats) -> tuple[Tensor, Tensor, Stats]:
    """Returns outcome rewards [N] and baselines [N], both clipped and normalised, and statistics of
    all rewards so far.
    """
    clipped = partial(_clipped, algorithm)
    rewards_N, baseline_N = (clipped(x_N, "raw") for x_N in (batch.rewards, batch.baseline))
    if algorithm.normalise_rewards:
        seen = seen.merge(whiten_stats(rewards_N, (batch.outcome_at >= 0) & rewards_N.isfinite()))
        scale = (seen.variance() + 1e-8) ** -0.5 if seen.variance() else 1.0
        rewards_N, baseline_N = ((x_N - seen.mean) * scale for x_N in (rewards_N, baseline_N))
    return clipped(rewards_N, "normalised").float(), clipped(baseline_N, "normalised").float(), seen


def _clipped(algorithm: Algorithm, x_N: Tensor, stage: str) -> Tensor:
    """Returns [N] fp64, clipped to `reward_clip` if `stage` is the stage that clips."""
    x_N = x_N.double()
    if algorithm.reward_clip is None or stage != algorithm.reward_clip_stage:
        return x_N
    return x_N.clamp(*algorithm.reward_clip)


def has_spread(batch: TrainBatch, algorithm: Algorithm) -> bool:
    """Returns True if the rewards of some group differ by more than rounding.

    Rewards are clipped as for advantages. Scores are compared for estimators per row, step rewards
    for grpo_process, and both for other estimators per token.
    """
    rewards_T = _with_outcomes(batch, _clipped(algorithm, batch.rewards, "raw").float())
    rows = (batch.mask, batch.cu_seqlens, batch.group)
    compared = {"dr_grpo", "grpo_process"}
    if algorithm.advantage in PER_ROW:
        compared = {"dr_grpo"}
    elif algorithm.advantage == "grpo_process":
        compared = {"grpo_process"}
    return any(
        ADVANTAGES[name](rewards_T, *rows, step_ends_T=batch.step_ends).any() for name in compared
    )


def _with_outcomes(batch: TrainBatch, rewards_N: Tensor) -> Tensor:
    """Returns `token_rewards` with each row's outcome replaced by `rewards_N`.

    The reward of a process step at the same position stays.
    """
    has_outcome_N = batch.outcome_at >= 0
    position_N = batch.outcome_at[has_outcome_N]
    # reward of a process step at the outcome's position; exactly 0 without one
    step_N = batch.token_rewards[position_N] - batch.rewards[has_outcome_N]
    return batch.token_rewards.index_put((position_N,), step_N + rewards_N[has_outcome_N])


def _kl_loss(new_T: Tensor, old_T: Tensor, ref_T: Tensor, term: KlTerm) -> Tensor:
    """Returns the KL term of the loss, without its coefficient.

    With `importance_weighted` it is multiplied by pi / pi_old, since the old policy drew the
    samples. The ratio carries gradient for the estimators whose value is unbiased; k2 and k3+
    already have the gradient of KL.
    """
    kl_T = KL[term.estimator](new_T, ref_T, value_clamp=term.value_clamp)
    if not term.importance_weighted:
        return kl_T
    ratio_T = likelihood_ratio(new_T - old_T)
    return kl_T * (ratio_T.detach() if term.estimator in ("k2", "k3+") else ratio_T)


def _mean_of_rows(kl_T: Tensor, batch: TrainBatch) -> float:
    """Returns the mean, over trained rows, of each row's mean."""
    rows = Rows.of(batch.mask, batch.cu_seqlens)
    return float(rows.mean(kl_T.double())[rows.num_tokens_N > 0].mean())
