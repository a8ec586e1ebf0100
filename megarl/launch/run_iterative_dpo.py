"""Runs stage iterative_dpo on one rank: the RL loop, with DPO on the best and the worst sample of each prompt."""

from __future__ import annotations

from megarl.algorithms.preference import DpoObjective, best_and_worst
from megarl.config.schema import Config
from megarl.launch.build import export, open_rank
from megarl.launch.exit_codes import CurrentPhase
from megarl.launch.run_rl import make_engine, train_policy
from megarl.platform.env import Env


def run_iterative_dpo(config: Config, env: Env, phase: CurrentPhase) -> None:
    """Runs `megarl train` of this stage on this rank."""
    with open_rank(config, env, phase) as rank:
        objective = DpoObjective(config.algorithm, config.rollout.max_tokens, options=config.dpo)
        export(rank, train_policy(rank, make_engine, objective, best_and_worst))
