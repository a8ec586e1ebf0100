"""Runs stage sft on one rank."""

from __future__ import annotations

from functools import cache, partial
from math import inf

from megarl.config.schema import Config
from megarl.data.collate import supervised_batch
from megarl.launch.build import make_prompts, make_trainer, open_rank
from megarl.launch.exit_codes import CurrentPhase
from megarl.launch.offline import offline_run
from megarl.platform.env import Env
from megarl.stages.offline import train_offline
from megarl.stages.sft import Sft


def run_sft(config: Config, env: Env, phase: CurrentPhase) -> None:
    """Runs `megarl train` of stage sft on this rank."""
    with open_rank(config, env, phase) as rank:
        trainer, prompts = make_trainer(rank), make_prompts(rank)
        examples = partial(supervised_batch, rank.tokenizer)
        held_out = cache(lambda: examples(make_prompts(rank, "eval").take(config.eval.size, repeat=False)))
        with offline_run(rank, trainer, prompts) as run:
            until, patience = config.sft.until_accuracy, config.sft.patience or inf
            sft = Sft(run, trainer, held_out, config.eval.every, until, patience)
            train_offline(run, examples, sft.learn, is_done=sft.is_done)
