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
from megarl.trainer.trainer import Gradients, Trainer
from megarl.types import (
    MicrobatchPlan,
    ScoredBatch,
    StepReport,
    TokenOutputs,
    TokenScores,
    TrainBatch,
)

SelectRows = Callable[[ScoredBatch], list[int]]


@dataclass
class PolicyLearner:
    """roles.Learner of a policy.

    If the objective needs a reference and `frozen` has none, the current policy becomes it.
    """

    trainer: Trainer
    objective: Objective
    seed: int = 0  # seeds clip_cov's choice of tokens and the order of later epochs
    span: SpanContext = nullcontext  # times "logprobs" and "update"
    # field of TokenScores -> forward pass of the frozen model that computes it
    frozen: Mapping[str, Callable[[TrainBatch], TokenOutputs]] = field(default_factory=dict)
    # record the layers' choices while computing old log-probs, and replay them in the updates
    records_choices: bool = False
    reference: Reference | FrozenBase | None = None

    def __post_init__(self) -> None:
        if self.objective.needs_reference and "ref_logprobs" not in self.frozen:
            self.reference = self.reference or reference_of(self.trainer)

    @property
    def trainers(self) -> list[Trainer]:
        return [self.trainer]

    def score(self, batch: TrainBatch) -> TokenScores:
        """Returns log-probs of `labels` under the policy, the reference and other frozen models.

        The policy's are None if nothing reads them before the update, whose own forward pass
        computes them. The reference's are None if there is no reference or it is still the policy.
        """
        needs_old = (
            self.objective.reads_old_logprobs
            or self.trainer.train.updates_per_step > 1
            or self.records_choices
        )
        scores = TokenScores()
        with self.span("logprobs"):
            if needs_old:
                scores = self._scored(batch)
            if self.reference and not self.reference.is_policy:
                batch = replace(batch, choices=())  # the reference has its own
                with self.reference.in_use():
                    scores = replace(scores, ref_logprobs=self.trainer.logprobs(batch))
            for name, forward in self.frozen.items():
                outputs = forward(batch)
                scores = replace(scores, **{name: outputs.logprobs_T})
                top_TK = outputs.extra_logprobs_TK
                ids_TK = outputs.extra_labels_TK
                if ids_TK is None or top_TK is None:
                    continue
                # mask ids that are not in the policy's vocabulary
                top_TK = top_TK.masked_fill(ids_TK >= self.trainer.shape.vocab, -torch.inf)
                scores = replace(scores, extra_labels=ids_TK.int(), teacher_top_logprobs=top_TK)
        return scores

    def _scored(self, batch: TrainBatch) -> TokenScores:
        """Computes the policy's log-probs, and records choices if the updates follow them."""
        outputs = self.trainer.forward(batch, record=self.records_choices)
        return TokenScores(outputs.logprobs_T, choices=outputs.choices)

    def prepare(self, batch: ScoredBatch) -> ScoredBatch:
        """Returns the batch with old log-probs, computing them now if `score` did not."""
        if batch.old_logprobs is not None:
            return batch
        return replace(batch, **self._scored(batch).known())

    def update(self, batch: ScoredBatch, *, gate: Gate = lambda batch: {}) -> StepReport:
        """Runs the updates of one batch.

        Raises CheckFailed, before changing anything, if `gate` refuses the batch. The gate needs
        old log-probs. If the update's own forward pass computes them, the gate runs between that
        pass and the optimizer step; otherwise it runs before the update.
        """
        objective = self.objective
        plans = batch_plans(batch, self.trainer, self.seed, couples_rows=objective.couples_rows)
        metrics = {"packing/efficiency": plans[0].efficiency}
        if len(plans[0].rows) > 1 or objective.selects_tokens:
            batch = self.prepare(batch)
        if batch.old_logprobs is not None:
            metrics |= gate(batch)
        updates = []
        with self.span("update"):
            for plan in plans:
                weights_T = objective.weights(batch, plan)
                for part in plan.updates():
                    gradients = self.backward(batch, part, weights_T, len(updates))
                    if batch.old_logprobs is None:
                        outputs = self.trainer.gathered(gradients.outputs)
                        batch = replace(batch, old_logprobs=outputs.logprobs_T)
                        metrics |= gate(batch)
                    report = self.trainer.apply(gradients)
                    measured = objective.metrics(batch, report.metrics)
                    updates.append(replace(report, metrics=measured))
            self.trainer.finish_batch()
        if isinstance(self.reference, Reference):
            self.reference.is_policy = False
        return StepReport(tuple(updates), metrics)

    def backward(
        self, batch: ScoredBatch, plan: MicrobatchPlan, weights_T: Tensor, index: int
    ) -> Gradients:
        objective = self.objective
        select_T = None
        if objective.selects_tokens:
            logprobs_T = batch.old_logprobs if index == 0 else self.trainer.logprobs(batch)
            assert logprobs_T is not None
            seed = self.seed + 1000 * self.trainer.scheduler.step + index
            select_T = objective.select(batch, logprobs_T, plan, seed=seed)
        return self.trainer.backward(
            batch,
            plan,
            objective.loss(batch, select_T),
            weights_T,
            needs_entropy=objective.algorithm.entropy_coef != 0,
        )


def batch_plans(
    batch: ScoredBatch, trainer: Trainer, seed: int, *, couples_rows: bool = False
) -> list[MicrobatchPlan]:
    """Returns a plan for each pass over the batch.

    With `couples_rows`, the rows of a group share a micro-batch.
    """
    train = trainer.train
    lengths_G = batch.group.bincount(batch.lengths_N)
    # keep groups whole to compute their prompts once, if every group fits into a micro-batch
    is_whole = trainer.shares_prefixes and not (lengths_G > train.max_tokens_per_microbatch).any()
    units = batch.group.tolist() if is_whole or couples_rows else None
    plans = []
    for epoch in range(train.epochs_per_batch):
        order = None
        # later epochs are shuffled, unless one update takes the whole batch
        if epoch > 0 and train.updates_per_step > 1:
            order = f"{seed} {trainer.scheduler.step} {epoch}"
        plans.append(plan_microbatches(batch, trainer.layout, train, units=units, shuffle=order))
    return plans


@dataclass(frozen=True)
class SelectingLearner:
    """roles.Learner that trains on the rows that `select` returns; the gate sees only these."""

    learner: Learner
    select: SelectRows

    def score(self, batch: TrainBatch) -> TokenScores:
        return TokenScores()

    def update(self, batch: ScoredBatch, *, gate: Gate) -> StepReport:
        part = take_rows(batch, self.select(batch))
        part = replace(part, **self.learner.score(part).known())
        report = self.learner.update(part, gate=gate)
        skipped = batch.group.unique().numel() - part.group.unique().numel()
        return replace(report, metrics={**report.metrics, "groups/skipped": skipped})
