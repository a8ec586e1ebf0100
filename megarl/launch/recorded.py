"""Roles that also tell telemetry how long they took and what they saw, so that neither they nor the loop have to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from megarl.data.tokenizer import Tokenizer
from megarl.roles import Actor, Prompts, Rewards, Weights
from megarl.rollout.schedule import Rollouts, digest
from megarl.telemetry.metrics import publish_metrics, spread_metrics
from megarl.types import (
    Group,
    LogProbs,
    MicrobatchPlan,
    Prompt,
    PublishReport,
    Sample,
    ScoredBatch,
    StepReport,
    TrainBatch,
)

__all__ = ["Record", "RecordedActor", "RecordedRewards", "RecordedRollouts", "RecordedWeights", "Span"]

Record = Callable[[Mapping[str, Any]], None]  # Telemetry.record
Span = Callable[[str], AbstractContextManager[None]]  # Telemetry.span


@dataclass(frozen=True)
class RecordedActor:
    actor: Actor
    record: Record
    span: Span

    def logprobs(self, batch: TrainBatch) -> LogProbs:
        with self.span("logprobs"):
            return self.actor.logprobs(batch)

    def update(self, batch: ScoredBatch, plan: MicrobatchPlan) -> StepReport:
        with self.span("update"):
            report = self.actor.update(batch, plan)
        self.record({"packing/efficiency": plan.efficiency})
        return report


@dataclass(frozen=True)
class RecordedRewards:
    """Makes the text first, as the engine speaks token ids only."""

    rewards: Rewards
    tokenizer: Tokenizer
    span: Span

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]:
        decode = self.tokenizer.decode
        with self.span("reward"):
            texts = [decode(sample.tokens[sample.trainable].tolist()) for sample in samples]
            return self.rewards.score(prompts, [replace(s, text=text) for s, text in zip(samples, texts, strict=True)])


@dataclass(frozen=True)
class RecordedRollouts:
    rollouts: Rollouts
    record: Record

    def collect(self, prompts: Prompts, count: int, *, version: int) -> list[Group]:
        groups = self.rollouts.collect(prompts, count, version=version)
        self.record(
            {"rollout/digest": digest(groups), **self.rollouts.counts, **spread_metrics(self.rollouts.generated)}
        )
        return groups


@dataclass(frozen=True)
class RecordedWeights:
    weights: Weights
    record: Record

    def publish(self, *, version: int) -> PublishReport:
        report = self.weights.publish(version=version)
        self.record(publish_metrics(report))
        return report
