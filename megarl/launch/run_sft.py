"""Builds and runs an SftRun on one rank."""

from __future__ import annotations

from functools import partial

from megarl.config.schema import Config
from megarl.data.collate import supervised_batch
from megarl.launch.build import (
    check_weights,
    export,
    make_checkpoints,
    make_prompts,
    make_trainer,
    open_rank,
    rank_telemetry,
    saved,
)
from megarl.launch.exit_codes import CurrentPhase
from megarl.launch.phases import TimedPhases
from megarl.platform.env import Env
from megarl.stages.sft import SftRun, sft
from megarl.types import ObjectiveState


def run_sft(config: Config, env: Env, phase: CurrentPhase) -> None:
    """Runs `megarl train` of stage sft on this rank."""
    with open_rank(config, env, phase) as rank:
        trainer, prompts = make_trainer(rank), make_prompts(rank)
        checkpoint = make_checkpoints(rank, trainer, prompts, ObjectiveState(kl_coef=0.0))
        start, state = checkpoint.restore(config.checkpoint.resume)
        check_weights(rank, trainer)
        with rank_telemetry(rank, start) as telemetry:
            run = SftRun(
                prompts=prompts,
                examples=partial(supervised_batch, rank.tokenizer),
                trainer=trainer,
                phases=TimedPhases(telemetry.span, telemetry.add, rank.device.torch, trainer.memory, current=phase),
                is_stopping=lambda: any(rank.transport.gather(phase.is_stopping)),
                checkpoint=checkpoint,
                telemetry=telemetry,
                state=state,
                steps=config.train.steps,
                prompts_per_step=config.train.prompts_per_step,
                until_accuracy=config.sft.until_accuracy,
                start=start,
            )
            with saved(trainer, checkpoint):
                sft(run)
        export(rank, trainer)
