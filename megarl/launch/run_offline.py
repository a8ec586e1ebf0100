"""Runs what needs no engine on one rank: the stages sft, dpo and reward_model, and `megarl check`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from math import inf
from typing import Any

from megarl.config.load import changed, run_dir
from megarl.data.collate import supervised_batch
from megarl.data.preferences import preference_batch, step_batch
from megarl.data.prompts import PromptStream
from megarl.debug.layout_check import check_layouts, compare, prompt_rows
from megarl.launch.build import (
    Rank,
    check_weights,
    export,
    make_checkpoints,
    make_evaluation,
    make_prompts,
    make_trainer,
    rank_telemetry,
    saved,
)
from megarl.launch.phases import TimedPhases
from megarl.platform.device import peak_gb
from megarl.stages.dpo import DpoLearner
from megarl.stages.offline import OfflineRun, train_offline
from megarl.stages.reward_model import Rankings, Steps, held_out_accuracy
from megarl.stages.sft import Sft
from megarl.trainer.heads import RewardHead
from megarl.trainer.reference import reference_of
from megarl.trainer.trainer import Trainer
from megarl.types import ObjectiveState, Prompt, StepReport

Examples = Callable[[Sequence[Prompt]], Any]  # prompts -> the batch of a stage
CHECKED_ROWS = 8  # in the batch of `megarl check`
RANDOM_TOKENS = 8  # that a row without an answer to train on gets after its prompt


def run_sft(rank: Rank) -> None:
    config, trainer, prompts = rank.config, make_trainer(rank), make_prompts(rank)
    examples = partial(supervised_batch, rank.tokenizer)
    with _offline_run(rank, trainer, prompts) as run:
        until, patience = config.sft.until_accuracy, config.sft.patience or inf
        sft = Sft(run, trainer, _held_out(rank, examples), config.eval.every, until, patience)
        train_offline(run, examples, sft.learn, is_done=sft.is_done)


def run_dpo(rank: Rank) -> None:
    trainer, prompts = make_trainer(rank), make_prompts(rank)
    reference = reference_of(trainer)  # before a checkpoint is restored
    with _offline_run(rank, trainer, prompts) as run:
        learner = DpoLearner(trainer, reference, rank.config.dpo, prompts.kept, run.telemetry.span)
        _train(
            rank, run, partial(preference_batch, rank.tokenizer), learner.update, learner.accuracy
        )


def run_reward_model(rank: Rank) -> None:
    options = rank.config.reward_model
    head = RewardHead(
        kind="process" if options.process else options.head, aggregate=options.aggregate
    )
    trainer, prompts = make_trainer(rank, head=head), make_prompts(rank)
    if options.process:
        model, examples = (
            Steps(trainer),
            partial(step_batch, rank.tokenizer, separator=options.separator),
        )
    else:
        model = Rankings(
            trainer, head, centre=options.centre, by_prompt=options.average == "prompts"
        )
        examples = partial(preference_batch, rank.tokenizer)
    with _offline_run(rank, trainer, prompts) as run:
        _train(rank, run, examples, model.update, partial(held_out_accuracy, model))


def run_check(rank: Rank) -> None:
    """Compares the layouts of layouts.json, one after another; rank 0 writes check.json."""
    config = changed(rank.config, "train", updates_per_step=1, epochs_per_batch=1)
    rank, env = replace(rank, config=config), rank.env
    prompts = make_prompts(rank).take(CHECKED_ROWS)
    if config.stage == "sft":
        batch = supervised_batch(rank.tokenizer, prompts)
    else:
        batch = prompt_rows(prompts, num_tokens=RANDOM_TOKENS, vocab=rank.shape.vocab)
    layouts, build = (
        json.loads((run_dir(config) / "layouts.json").read_text()),
        partial(make_trainer, rank),
    )
    results = check_layouts(layouts, batch, build, world=env.world_size, rank=env.rank)
    if env.is_main:
        fp8 = config.precision.fp8
        rows = compare(results, fp8.recipe if fp8 else config.train.dtype)
        (run_dir(config) / "check.json").write_text(json.dumps(rows))


@contextmanager
def _offline_run(rank: Rank, trainer: Trainer, prompts: PromptStream) -> Iterator[OfflineRun]:
    """Resumes from the newest checkpoint, if any; saves the progress on a failure, and exports at the end."""
    train = rank.config.train
    checkpoint = make_checkpoints(rank, trainer, prompts, ObjectiveState(kl_coef=0.0))
    start, state = checkpoint.restore(rank.config.checkpoint.resume)
    check_weights(rank, trainer)
    with rank_telemetry(rank, start) as telemetry, saved([trainer], checkpoint):
        telemetry.add({"memory/startup/peak_gb": peak_gb(rank.device)})
        yield OfflineRun(
            prompts=prompts,
            phases=TimedPhases(
                telemetry.span, telemetry.add, rank.device, [trainer], current=rank.phase
            ),
            checkpoint=checkpoint,
            telemetry=telemetry,
            state=state,
            steps=train.steps,
            prompts_per_step=train.prompts_per_step,
            start=start,
            is_stopping=lambda: any(rank.transport.gather(rank.phase.is_stopping)),
        )
    export(rank, trainer)


def _train(
    rank: Rank,
    run: OfflineRun,
    examples: Examples,
    update: Callable[[Any], StepReport],
    accuracy: Callable[[Any], Mapping[str, float]],
) -> None:
    """Trains, and measures the accuracy on held-out examples every eval.every steps."""
    held_out, evaluated = _held_out(rank, examples), run.telemetry.evaluated
    evaluation = make_evaluation(
        rank, [lambda _step: accuracy(held_out())], run.start, evaluated=evaluated
    )
    train_offline(run, examples, update, evaluate=evaluation.maybe_run)


def _held_out(rank: Rank, examples: Examples) -> Callable[[], Any]:
    return cache(
        lambda: examples(make_prompts(rank, "eval").take(rank.config.eval.size, repeat=False))
    )
