"""Runs stage best_of_n on one rank: the RL loop, with SFT on the best sample of each prompt (RAFT)."""

from __future__ import annotations

from megarl.algorithms.objective import Objective
from megarl.algorithms.preference import best_and_worst
from megarl.config.schema import Config
from megarl.launch.build import export, open_rank
from megarl.launch.exit_codes import CurrentPhase
from megarl.launch.run_rl import make_engine, train_policy
from megarl.platform.env import Env


def run_best_of_n(config: Config, env: Env, phase: CurrentPhase) -> None:
    """Runs `megarl train` of this stage on this rank."""
    with open_rank(config, env, phase) as rank:
        algorithm = config.algorithm.model_copy(update={"loss": "sft", "correction": "none", "correction_options": {}})
        objective = Objective(algorithm, config.rollout.max_tokens)
        export(rank, train_policy(rank, make_engine, objective, lambda batch: best_and_worst(batch)[::2]))
