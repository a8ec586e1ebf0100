"""Supervised fine-tuning on the same actor: examples in, one update a step, no engine.

Each batch is fresh, and is scored before it is trained on: exp of an answer's log-prob is the probability
that sampling would give exactly that answer, so its mean is the sampled accuracy, measured without sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megarl.algorithms.objective import supervised
from megarl.config.schema import Config
from megarl.data.packing import plan_microbatches
from megarl.data.supervised import Examples
from megarl.layout import Layout
from megarl.roles import Actor, Checkpoint, Phases, Prompts, Telemetry
from megarl.types import LogProbs, ObjectiveState, TrainBatch

__all__ = ["SftRun", "sampled_accuracy", "sft"]


@dataclass
class SftRun:
    config: Config
    layout: Layout
    prompts: Prompts
    examples: Examples  # prompts -> TrainBatch
    actor: Actor
    phases: Phases
    checkpoint: Checkpoint
    telemetry: Telemetry
    state: ObjectiveState
    start: int = 0


def sft(run: SftRun) -> None:
    config = run.config
    for step in range(run.start, config.train.steps):
        with run.telemetry.step(step):
            batch = run.examples(run.prompts.take(config.train.prompts_per_step))
            with run.phases.train():
                logprobs = run.actor.logprobs(batch)
                accuracy = sampled_accuracy(batch, logprobs)
                scored = supervised(batch, logprobs)
                report = run.actor.update(scored, plan_microbatches(scored, run.layout, config.train))
                done = config.sft.until_accuracy is not None and accuracy >= config.sft.until_accuracy
                run.checkpoint.maybe_save(step + 1, run.state, last=done)
            run.telemetry.record({"accuracy/sampled": accuracy})
            run.telemetry.log(step, (), report)
        if done:
            return


def sampled_accuracy(batch: TrainBatch, logprobs: LogProbs) -> float:
    """Mean probability that sampling the policy gives exactly the reference answer; 0..1."""
    values = torch.where(batch.mask, logprobs.old, 0.0).double()
    ends = torch.cat([values.new_zeros(1), values.cumsum(0)])[batch.cu_seqlens]
    return float(ends.diff().exp().mean())
