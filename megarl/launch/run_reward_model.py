"""Runs stage reward_model on one rank."""

from __future__ import annotations

from functools import cache, partial

from megarl.config.schema import Config
from megarl.data.preferences import preference_batch
from megarl.data.steps import step_batch
from megarl.launch.build import make_evaluation, make_prompts, make_trainer, open_rank
from megarl.launch.exit_codes import CurrentPhase
from megarl.launch.offline import offline_run
from megarl.platform.env import Env
from megarl.stages.offline import train_offline
from megarl.stages.reward_model import Rankings, Steps, held_out_accuracy
from megarl.trainer.heads import RewardHead


def run_reward_model(config: Config, env: Env, phase: CurrentPhase) -> None:
    """Runs `megarl train` of stage reward_model on this rank."""
    options = config.reward_model
    head = RewardHead(kind="process" if options.process else options.head, aggregate=options.aggregate)
    with open_rank(config, env, phase) as rank:
        trainer, prompts = make_trainer(rank, head=head), make_prompts(rank)
        if options.process:
            model, examples = Steps(trainer), partial(step_batch, rank.tokenizer, separator=options.separator)
        else:
            model = Rankings(trainer, head, centre=options.centre, by_prompt=options.average == "prompts")
            examples = partial(preference_batch, rank.tokenizer)
        held_out = cache(lambda: examples(make_prompts(rank, "eval").take(config.eval.size, repeat=False)))
        with offline_run(rank, trainer, prompts) as run:
            measures, evaluated = [lambda _step: held_out_accuracy(model, held_out())], run.telemetry.evaluated
            evaluation = make_evaluation(rank, measures, every=config.eval.every, evaluated=evaluated)
            evaluation.forget(run.start)
            train_offline(run, examples, model.update, evaluate=evaluation.maybe_run)
