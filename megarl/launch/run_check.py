"""Runs `megarl check` on one rank: the layouts of layouts.json, one after another; rank 0 writes check.json."""

from __future__ import annotations

import json

from megarl.config.load import run_dir
from megarl.config.schema import Config
from megarl.data.collate import supervised_batch
from megarl.debug.layout_check import check_layouts, compare, prompt_rows
from megarl.launch.build import make_prompts, make_trainer, open_rank
from megarl.launch.exit_codes import CurrentPhase
from megarl.platform.env import Env

NUM_ROWS = 8  # in the batch; a row without an answer to train on gets RANDOM_TOKENS after its prompt
RANDOM_TOKENS = 8


def run_check(config: Config, env: Env, phase: CurrentPhase) -> None:
    train = config.train.model_copy(update={"updates_per_step": 1, "epochs_per_batch": 1})
    with open_rank(config.model_copy(update={"train": train}), env, phase) as rank:
        prompts = make_prompts(rank).take(NUM_ROWS)
        if config.stage == "sft":
            batch = supervised_batch(rank.tokenizer, prompts)
        else:
            batch = prompt_rows(prompts, num_tokens=RANDOM_TOKENS, vocab=rank.shape.vocab)
        folder = run_dir(config)
        results = check_layouts(
            json.loads((folder / "layouts.json").read_text()),
            batch,
            lambda layout: make_trainer(rank, layout),
            world=env.world_size,
            rank=env.rank,
        )
        if env.is_main:
            (folder / "check.json").write_text(json.dumps(compare(results, config.train.dtype)))
