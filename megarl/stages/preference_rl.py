"""Stages that train on the best (and worst) sample of each prompt: best_of_n, iterative_dpo.

The training loop is in rl.py; the learner trains on the selected samples only.
"""

from megarl.algorithms.objective import Objective
from megarl.algorithms.preference import DpoObjective, best_and_worst
from megarl.run.checkpoints import export
from megarl.run.context import RankContext
from megarl.stages.rl import train_policy
from megarl.types import ScoredBatch


def best(batch: ScoredBatch) -> list[int]:
    """Returns the row of each prompt's best response; skips prompts whose rewards are all equal."""
    return best_and_worst(batch)[::2]


def best_of_n(rank: RankContext) -> None:
    """Trains by SFT on the best sample of each prompt (RAFT, arXiv 2304.06767)."""
    config = rank.config
    settings = {"loss": "sft", "correction": "none", "correction_options": {}}
    objective = Objective(config.algorithm.model_copy(update=settings), config.rollout.max_tokens)
    export(rank, train_policy(rank, objective=objective, select=best))


def iterative_dpo(rank: RankContext) -> None:
    """Trains by DPO on the best and the worst sample of each prompt."""
    config = rank.config
    objective = DpoObjective(config.algorithm, config.rollout.max_tokens, options=config.dpo)
    export(rank, train_policy(rank, objective=objective, select=best_and_worst))
