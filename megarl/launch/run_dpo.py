"""Runs stage dpo on one rank."""

from __future__ import annotations

from functools import cache, partial

from megarl.config.schema import Config
from megarl.data.preferences import preference_batch
from megarl.launch.build import make_evaluation, make_prompts, make_trainer, open_rank
from megarl.launch.exit_codes import CurrentPhase
from megarl.launch.offline import offline_run
from megarl.platform.env import Env
from megarl.stages.dpo import DpoLearner
from megarl.stages.offline import train_offline
from megarl.trainer.reference import Reference


def run_dpo(config: Config, env: Env, phase: CurrentPhase) -> None:
    """Runs `megarl train` of stage dpo on this rank."""
    with open_rank(config, env, phase) as rank:
        trainer, prompts = make_trainer(rank), make_prompts(rank)
        reference = Reference(trainer.parameters_by_name().values())  # before a checkpoint is restored
        examples = partial(preference_batch, rank.tokenizer)
        held_out = cache(lambda: examples(make_prompts(rank, "eval").take(config.eval.size, repeat=False)))
        with offline_run(rank, trainer, prompts) as run:
            learner = DpoLearner(trainer, reference, config.dpo, prompts.kept, run.telemetry.span)
            measures, evaluated = [lambda step: learner.accuracy(held_out())], run.telemetry.evaluated
            evaluation = make_evaluation(rank, measures, every=config.eval.every, evaluated=evaluated)
            evaluation.forget(run.start)
            train_offline(run, examples, learner.update, evaluate=evaluation.maybe_run)
