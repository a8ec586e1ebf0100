"""The stages, and the commands that run on ranks: what each needs, and where its code is. No torch.

Adding a stage: its file in megarl/stages/, its section and check in megarl/config/, and its line
here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megarl.config.dpo import check_comparison, check_dpo
from megarl.config.iterative import check_iterative_grpo
from megarl.config.section import Config
from megarl.config.sft import check_sft


@dataclass(frozen=True)
class Stage:
    """What the launcher and the checks of a config must know of a stage before a rank starts."""

    entry: str  # "module:function", called with the rank's run.context.Rank
    needs_engine: bool = False
    in_split: bool = False  # it also runs with launch.topology=split
    sections: tuple[str, ...] = ()  # of the config: others than its readers are warned
    check: Callable[[Config], None] = lambda config: None  # raises ValueError
    learns: Literal["prompts", "answers", "feedback"] = "prompts"  # what it reads of a task
    compares: bool = False  # it learns from comparing the samples of a prompt
    trains_second: bool = False  # it trains a second head or model


STAGES = {
    "rl": Stage("megarl.stages.rl:run", needs_engine=True, in_split=True),
    "sft": Stage("megarl.stages.sft:run", sections=("sft",), check=check_sft, learns="answers"),
    "reward_model": Stage(
        "megarl.stages.reward_model:run",
        sections=("reward_model",),
        learns="feedback",
        trains_second=True,
    ),
    "dpo": Stage("megarl.stages.dpo:run", sections=("dpo",), check=check_dpo, learns="feedback"),
    "iterative_grpo": Stage(
        "megarl.stages.iterative_grpo:run",
        needs_engine=True,
        sections=("iterative",),
        check=check_iterative_grpo,
        trains_second=True,
    ),
    "iterative_dpo": Stage(
        "megarl.stages.preference_rl:iterative_dpo",
        needs_engine=True,
        sections=("dpo",),
        check=check_comparison,
        compares=True,
    ),
    "best_of_n": Stage(
        "megarl.stages.preference_rl:best_of_n",
        needs_engine=True,
        check=check_comparison,
        compares=True,
    ),
}
RANK_COMMANDS = {  # other commands than train, whatever the stage is
    "eval": Stage("megarl.stages.evaluation:run", needs_engine=True),
    "parity": Stage("megarl.commands.rank_checks:parity", needs_engine=True),
    "sync": Stage("megarl.commands.rank_checks:sync", needs_engine=True),
    "check": Stage("megarl.commands.rank_checks:layouts"),
}


def program(stage: str, command: str) -> Stage:
    """Returns what a rank runs: the stage, or another command than `train`."""
    return STAGES[stage] if command == "train" else RANK_COMMANDS[command]


def needs_engine(stage: str, command: str) -> bool:
    """Returns True if the stage samples, or the command does whatever the stage is."""
    return STAGES[stage].needs_engine or program(stage, command).needs_engine
