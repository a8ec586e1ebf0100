"""The loop of stages without rollouts, such as sft and dpo: one batch of examples per step.

    prompts --examples--> batch --learn--> report

`train_offline` is the loop; `open_run` builds its parts on one rank. No engine is started.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from megarl.data.prompts import PromptStream
from megarl.platform.device import peak_gb
from megarl.roles import Checkpoint, Phases, Prompts, Telemetry
from megarl.run.checkpoints import export, make_checkpoints, saved
from megarl.run.context import RankContext, rank_telemetry
from megarl.run.data import make_prompts
from megarl.run.memory import place_optimizer_state
from megarl.run.models import check_weights
from megarl.run.phases import TimedPhases
from megarl.stages.evaluation import make_evaluation
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, ObjectiveState, Prompt, StepReport, Terminated

Examples = Callable[[Sequence[Prompt]], Any]  # prompts -> the stage's batch type


@dataclass
class OfflineRun:
    """The components of a run. `start` is the number of steps already done."""

    prompts: Prompts
    phases: Phases
    checkpoint: Checkpoint
    telemetry: Telemetry
    state: ObjectiveState
    steps: int
    prompts_per_step: int
    start: int
    is_stopping: Callable[[], bool]  # the same on every rank


def train_offline(
    run: OfflineRun,
    examples: Examples,
    learn: Callable[[Any], StepReport],
    *,
    evaluate: Callable[[int], Any] = lambda step: None,
    is_done: Callable[[StepReport], bool] = lambda report: False,
) -> None:
    evaluate(run.start)
    for step in range(run.start, run.steps):
        if run.is_stopping():
            raise Terminated("stopped by SIGTERM")
        with run.telemetry.step(step) as record:
            batch = examples(run.prompts.take(run.prompts_per_step))
            with run.phases.train():
                report = learn(batch)
            if not all(update.skipped for update in report.updates):
                run.state = replace(run.state, has_learned=True)
            with run.phases.save():
                run.checkpoint.maybe_save(step + 1, run.state, last=is_done(report))
            record(None, report, None)
        evaluate(step + 1)
        if is_done(report):
            break
    if run.start < run.steps and not run.state.has_learned:
        raise CheckFailed(
            "nothing was learned: each update of the run was skipped, as no token was trained or "
            "the gradient was not finite (update/skipped and loss in metrics.jsonl); correct the "
            "data or the settings, and start over"
        )


@contextmanager
def open_run(rank: RankContext, trainer: Trainer, prompts: PromptStream) -> Iterator[OfflineRun]:
    """Restores the configured checkpoint, yields the run, and exports the model at the end.

    If a check fails or SIGTERM arrives, saves the progress and re-raises.
    """
    train = rank.config.train
    checkpoint = make_checkpoints(rank, trainer, prompts, ObjectiveState(kl_coef=0.0))
    start, state = checkpoint.restore(rank.config.checkpoint.resume)
    check_weights(rank, trainer)
    place_optimizer_state(rank, [trainer])
    with rank_telemetry(rank, start) as telemetry, saved([trainer], checkpoint):
        telemetry.add({"memory/startup/peak_gb": peak_gb(rank.device)})
        yield OfflineRun(
            prompts=prompts,
            phases=TimedPhases(telemetry, rank.device, [trainer], None, rank.phase),
            checkpoint=checkpoint,
            telemetry=telemetry,
            state=state,
            steps=train.steps,
            prompts_per_step=train.prompts_per_step,
            start=start,
            is_stopping=lambda: any(rank.transport.gather(rank.phase.is_stopping)),
        )
    export(rank, trainer)


def train_measured(
    rank: RankContext,
    run: OfflineRun,
    examples: Examples,
    update: Callable[[Any], StepReport],
    accuracy: Callable[[Any], Mapping[str, float]],
) -> None:
    """Trains with `update`; every eval.every steps, evaluates `accuracy` on held-out examples."""
    batch = held_out(rank, examples)
    evaluation = make_evaluation(
        rank, [lambda _step: accuracy(batch())], run.start, run.telemetry.evaluated
    )
    train_offline(run, examples, update, evaluate=evaluation.maybe_run)


def held_out(rank: RankContext, examples: Examples) -> Callable[[], Any]:
    """Returns a function that builds the held-out batch on its first call, then caches it."""
    size = rank.config.eval.size
    return cache(lambda: examples(make_prompts(rank, "eval").take(size, repeat=False)))
