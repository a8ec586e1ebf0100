"""The learner of the RL loop: a policy, and the reference and teacher that the objective reads."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megarl.algorithms.objective import Objective
from megarl.data.collate import take_rows
from megarl.data.packing import plan_microbatches
from megarl.roles import Gate, Learner, SpanContext
from megarl.trainer.reference import FrozenBase, Reference, reference_of
from megarl.trainer.router_replay import BatchRoutes
from megarl.trainer.trainer import Trainer
from megarl.types import (
    MicrobatchPlan,
    ScoredBatch,
    StepReport,
    TokenOutputs,
    TokenScores,
    TrainBatch,
    UpdateReport,
)

SelectRows = Callable[[ScoredBatch], list[int]]


@dataclass
class PolicyLearner:
    """roles.Learner.

    Takes the trainer's current policy as the reference, unless it is one of `frozen`.
    """

    trainer: Trainer
    objective: Objective
    seed: int = 0  # for the random choice of tokens in clip_cov
    span: SpanContext = nullcontext  # times "logprobs" and "update"
    # other models, by the field of TokenScores that they compute
    frozen: Mapping[str, Callable[[TrainBatch], TokenOutputs]] = field(default_factory=dict)
    records_routes: bool = False  # of the pass that computes old log-probs; the updates replay them
    reference: Reference | FrozenBase | None = None

    def __post_init__(self) -> None:
        if self.objective.needs_reference and "ref_logprobs" not in self.frozen:
            self.reference = self.reference or reference_of(self.trainer)

    @property
    def trainers(self) -> list[Trainer]:
        return [self.trainer]

    def score(self, batch: TrainBatch) -> TokenScores:
        """Returns log-probs of `labels` under the current weights and those of the other models.

        The former are None if nothing reads them before the update, whose forward pass has them;
        those of the reference if there is none, or if it is the policy.
        """
        needs_old = (
            self.objective.reads_old_logprobs
            or self.trainer.train.updates_per_step > 1
            or self.records_routes
        )
        old_T = None
        routes = ()
        ref_T = None
        with self.span("logprobs"):
            if needs_old:
                old_T, routes = self._old_logprobs(batch)
            batch = replace(batch, routes=())  # those of the policy: other models have their own
            if self.reference and not self.reference.is_policy:
                with self.reference.in_use():
                    ref_T = self.trainer.logprobs(batch)
            scores = TokenScores(old_T, ref_T, routes=routes)
            for name, forward in self.frozen.items():
                outputs = forward(batch)
                scores = replace(scores, **{name: outputs.logprobs_T})
                top_TK = outputs.extra_logprobs_TK
                ids_TK = outputs.extra_labels_TK
                if ids_TK is None or top_TK is None:
                    continue
                # the policy has no such tokens
                top_TK = top_TK.masked_fill(ids_TK >= self.trainer.shape.vocab, -torch.inf)
                scores = replace(scores, teacher_top_ids=ids_TK.int(), teacher_top_logprobs=top_TK)
        return scores

    def _old_logprobs(self, batch: TrainBatch) -> tuple[Tensor, BatchRoutes]:
        """Returns log-probs under the current weights, and the routes that the updates replay."""
        if not self.records_routes:
            return self.trainer.logprobs(batch), batch.routes
        routes = []
        return self.trainer.logprobs(batch, record=routes), tuple(routes)

    def update(self, batch: ScoredBatch, *, gate: Gate | None = None) -> StepReport:
        """Runs the updates of one batch.

        Raises CheckFailed, before changing anything, if `gate` refuses the batch. The gate sees old
        log-probs: before the update or, where its own forward pass computes them, before its step.
        """
        objective = self.objective
        plans = batch_plans(batch, self.trainer, self.seed, couples_rows=objective.couples_rows)
        updates = []
        needs_old = len(plans[0].rows) > 1 or objective.selects_tokens
        if needs_old and batch.old_logprobs is None:
            old_T, routes = self._old_logprobs(batch)
            batch = replace(batch, old_logprobs=old_T, routes=routes)
        metrics = {"packing/efficiency": plans[0].efficiency}

        def judge(outputs: TokenOutputs) -> None:
            nonlocal batch
            batch = replace(batch, old_logprobs=outputs.logprobs_T)
            if gate is None:
                return
            judged = batch
            if self.records_routes:  # which the engine did not follow
                judged = replace(batch, routes=())
            metrics.update(gate(judged))

        is_scored = batch.old_logprobs is not None
        if is_scored:
            judge(TokenOutputs(batch.old_logprobs))
        is_judged = is_scored or (gate is None and len(plans) == 1)
        with self.span("update"):
            for plan in plans:
                weights_T = objective.weights(batch, plan)
                for part in plan.updates():
                    before_step = None if is_judged or updates else judge
                    updates.append(self._update(batch, part, weights_T, len(updates), before_step))
            self.trainer.finish_batch()
        if isinstance(self.reference, Reference):
            self.reference.is_policy = False
        return StepReport(tuple(updates), metrics)

    def _update(
        self,
        batch: ScoredBatch,
        plan: MicrobatchPlan,
        weights_T: Tensor,
        index: int,
        before_step: Callable[[TokenOutputs], None] | None,
    ) -> UpdateReport:
        objective = self.objective
        select_T = None
        if objective.selects_tokens:
            logprobs_T = batch.old_logprobs if index == 0 else self.trainer.logprobs(batch)
            assert logprobs_T is not None
            seed = self.seed + 1000 * self.trainer.scheduler.step + index
            select_T = objective.select(batch, logprobs_T, plan, seed=seed)
        report = self.trainer.step(
            batch,
            plan,
            objective.loss(batch, select_T),
            weights_T,
            before_step=before_step,
            needs_entropy=objective.algorithm.entropy_coef != 0,
        )
        return replace(report, metrics=objective.metrics(batch, report.metrics))


def batch_plans(
    batch: ScoredBatch, trainer: Trainer, seed: int, *, couples_rows: bool = False
) -> list[MicrobatchPlan]:
    """Returns a plan for each pass over the batch.

    With `couples_rows`, the rows of a group share a micro-batch.
    """
    train = trainer.train
    lengths_G = batch.group.bincount(batch.lengths_N)
    # rows of a group share their prompt, in a micro-batch large enough for the group
    is_whole = trainer.shares_prefixes and not (lengths_G > train.max_tokens_per_microbatch).any()
    units = batch.group.tolist() if is_whole or couples_rows else None
    plans = []
    for epoch in range(train.epochs_per_batch):
        order = None
        # later epochs take groups in another order, unless an update takes all of them
        if epoch > 0 and train.updates_per_step > 1:
            order = f"{seed} {trainer.scheduler.step} {epoch}"
        plans.append(plan_microbatches(batch, trainer.layout, train, units=units, shuffle=order))
    return plans


@dataclass(frozen=True)
class SelectingLearner:
    """roles.Learner: trains on some rows of each batch, `select`; the gate sees these."""

    learner: Learner
    select: SelectRows

    def score(self, batch: TrainBatch) -> TokenScores:
        return TokenScores(None, None)

    def update(self, batch: ScoredBatch, *, gate: Gate) -> StepReport:
        part = take_rows(batch, self.select(batch))
        scores = self.learner.score(part)
        part = replace(part, old_logprobs=scores.old_logprobs, ref_logprobs=scores.ref_logprobs)
        report = self.learner.update(part, gate=gate)
        skipped = batch.group.unique().numel() - part.group.unique().numel()
        return replace(report, metrics={**report.metrics, "groups/skipped": skipped})
