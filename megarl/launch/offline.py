"""Builds the OfflineRun of the stages without an engine (stages/offline.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megarl.data.prompts import PromptStream
from megarl.launch.build import Rank, check_weights, export, make_checkpoints, rank_telemetry, saved
from megarl.launch.phases import TimedPhases
from megarl.stages.offline import OfflineRun
from megarl.trainer.trainer import Trainer
from megarl.types import ObjectiveState


@contextmanager
def offline_run(rank: Rank, trainer: Trainer, prompts: PromptStream) -> Iterator[OfflineRun]:
    """Resumes from the newest checkpoint, if any; saves the progress on a failure, and exports at the end."""
    train = rank.config.train
    checkpoint = make_checkpoints(rank, trainer, prompts, ObjectiveState(kl_coef=0.0))
    start, state = checkpoint.restore(rank.config.checkpoint.resume)
    check_weights(rank, trainer)
    with rank_telemetry(rank, start) as telemetry, saved(trainer, checkpoint):
        yield OfflineRun(
            prompts=prompts,
            phases=TimedPhases(telemetry.span, telemetry.add, rank.device.torch, trainer.memory, current=rank.phase),
            checkpoint=checkpoint,
            telemetry=telemetry,
            state=state,
            steps=train.steps,
            prompts_per_step=train.prompts_per_step,
            start=start,
            is_stopping=lambda: any(rank.transport.gather(rank.phase.is_stopping)),
        )
    export(rank, trainer)
