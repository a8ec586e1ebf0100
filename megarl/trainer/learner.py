"""The learner of the RL loop: a policy, and its reference and teacher where the objective reads their log-probs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.objective import Objective
from megarl.data.collate import take_rows
from megarl.data.packing import plan_microbatches
from megarl.roles import Gate, Learner
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

BeforeStep = Callable[[TokenOutputs], None]
SelectRows = Callable[[ScoredBatch], list[int]]
Frozen = Mapping[
    str, Callable[[TrainBatch], TokenOutputs]
]  # other models, by the field of TokenScores they compute


@dataclass(frozen=True)
class PolicyLearner:
    """roles.Learner."""

    trainer: Trainer
    objective: Objective
    reference: Reference | FrozenBase | None
    seed: int  # for the random choice of tokens in clip_cov
    span: Callable[[str], AbstractContextManager[Any]] = (
        nullcontext  # times "logprobs" and "update"
    )
    frozen: Frozen = field(default_factory=dict)
    records_routes: bool = False  # of the pass that computes old log-probs; the updates replay them

    @classmethod
    def of(
        cls,
        trainer: Trainer,
        objective: Objective,
        *,
        seed: int = 0,
        frozen: Frozen | None = None,
        **options: Any,
    ) -> PolicyLearner:
        """The reference policy is the trainer's current one (`reference_of`), unless it is one of `frozen`."""
        is_copied = objective.needs_reference and "ref_logprobs" not in (frozen or {})
        reference = reference_of(trainer) if is_copied else None
        return cls(trainer, objective, reference, seed, frozen=frozen or {}, **options)

    @property
    def trainers(self) -> list[Trainer]:
        return [self.trainer]

    def timed(self, span: Callable[[str], AbstractContextManager[Any]]) -> PolicyLearner:
        return replace(self, span=span)

    def score(self, batch: TrainBatch) -> TokenScores:
        """Returns log-probs of `labels` under the current weights: None if nothing reads them before the update, whose
        forward pass has them. And under the reference, if there is one that is not the policy."""
        needs_old = (
            self.objective.reads_old_logprobs
            or self.trainer.train.updates_per_step > 1
            or self.records_routes
        )
        with self.span("logprobs"):
            (old_T, routes), ref_T = self._old_logprobs(batch) if needs_old else (None, ()), None
            batch = replace(batch, routes=())  # those of the policy: other models have their own
            if self.reference is not None and not self.reference.is_policy:
                with self.reference.in_place_of(self.trainer.parameters_by_name().values()):
                    ref_T = self.trainer.logprobs(batch)
            scores = TokenScores(old_T, ref_T, routes=routes)
            for name, forward in self.frozen.items():
                outputs = forward(batch)
                scores, top_TK = (
                    replace(scores, **{name: outputs.logprobs_T}),
                    outputs.extra_logprobs_TK,
                )
                if (ids_TK := outputs.extra_labels_TK) is not None and top_TK is not None:
                    top_TK = top_TK.masked_fill(
                        ids_TK >= self.trainer.shape.vocab, -torch.inf
                    )  # not the policy's
                    scores = replace(
                        scores, teacher_top_ids=ids_TK.int(), teacher_top_logprobs=top_TK
                    )
            return scores

    def _old_logprobs(self, batch: TrainBatch) -> tuple[Tensor, BatchRoutes]:
        """Returns log-probs under the current weights, and the routes under which the updates compare with them."""
        if not self.records_routes:
            return self.trainer.logprobs(batch), batch.routes
        routes: list[Any] = []
        return self.trainer.logprobs(batch, record=routes), tuple(routes)

    def update(self, batch: ScoredBatch, *, gate: Gate | None = None) -> StepReport:
        """Runs the updates of one batch. Raises CheckFailed, before changing anything, if `gate` refuses the batch. The
        gate sees old log-probs: before the update, or where they are those of its own forward pass, before its step."""
        plans = batch_plans(
            batch, self.trainer, self.seed, couples_rows=self.objective.couples_rows
        )
        updates: list[UpdateReport] = []
        if batch.old_logprobs is None and (len(plans[0].rows) > 1 or self.objective.selects_tokens):
            old_T, routes = self._old_logprobs(batch)
            batch = replace(batch, old_logprobs=old_T, routes=routes)
        metrics: dict[str, float] = {"packing/efficiency": plans[0].efficiency}

        def judge(outputs: TokenOutputs) -> None:
            nonlocal batch
            batch = replace(batch, old_logprobs=outputs.logprobs_T)
            if gate is not None:  # the engine did not follow recorded routes
                metrics.update(gate(replace(batch, routes=()) if self.records_routes else batch))

        is_scored = batch.old_logprobs is not None
        if is_scored:
            judge(TokenOutputs(batch.old_logprobs))
        is_judged = is_scored or (gate is None and len(plans) == 1)
        with self.span("update"):
            for plan in plans:
                weights_T = self.objective.weights(batch, plan)
                for part in plan.updates():
                    before_step = None if is_judged or updates else judge
                    updates.append(self._update(batch, part, weights_T, len(updates), before_step))
            self.trainer.finish_batch()
        if self.reference is not None:
            self.reference.is_policy = False
        return StepReport(tuple(updates), metrics)

    def _update(
        self,
        batch: ScoredBatch,
        plan: MicrobatchPlan,
        weights_T: Tensor,
        index: int,
        before_step: BeforeStep | None,
    ) -> UpdateReport:
        select_T = None
        if self.objective.selects_tokens:
            seed = self.seed + 1000 * self.trainer.scheduler.step + index
            logprobs_T = batch.old_logprobs if index == 0 else self.trainer.logprobs(batch)
            assert logprobs_T is not None
            select_T = self.objective.select(batch, logprobs_T, plan, seed=seed)
        loss = self.objective.loss(batch, select_T)
        needs_entropy = self.objective.algorithm.entropy_coef != 0
        report = self.trainer.step(
            batch, plan, loss, weights_T, before_step=before_step, needs_entropy=needs_entropy
        )
        return replace(report, metrics=self.objective.metrics(batch, report.metrics))


def batch_plans(
    batch: ScoredBatch, trainer: Trainer, seed: int, *, couples_rows: bool = False
) -> list[MicrobatchPlan]:
    """Returns a plan for each pass over the batch; with `couples_rows` those of a group share a micro-batch."""
    train, lengths_G = trainer.train, batch.group.bincount(batch.cu_seqlens.diff())
    # rows of a group share their prompt, in a micro-batch large enough for the group
    is_whole = trainer.shares_prefixes and not (lengths_G > train.max_tokens_per_microbatch).any()
    units = batch.group.tolist() if is_whole or couples_rows else None
    # later epochs take groups in another order, unless an update takes all of them
    orders = [f"{seed} {trainer.scheduler.step} {epoch}" for epoch in range(train.epochs_per_batch)]
    seeds = [None, *orders[1:]] if train.updates_per_step > 1 else [None] * len(orders)
    return [
        plan_microbatches(batch, trainer.layout, train, units=units, shuffle=order)
        for order in seeds
    ]


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
