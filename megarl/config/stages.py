"""The training stages and the commands that run on ranks: entry points and requirements. No torch.

To add a stage, add its module in megarl/stages/, its section and check in megarl/config/, and an
entry here.
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
    """The properties of a stage or command that the launcher and the config checks need before a
    rank starts.
    """

    entry: str  # "module:function", called with a run.context.RankContext
    needs_engine: bool = False
    in_split: bool = False  # also supports launch.topology=split
    sections: tuple[str, ...] = ()  # config sections for this stage; other stages warn about them
    check: Callable[[Config], None] = lambda config: None  # raises ValueError
    learns: Literal["prompts", "answers", "feedback"] = "prompts"  # part of a task that is read
    compares: bool = False  # trains on comparisons of a prompt's samples
    trains_second: bool = False  # trains a second head or model


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
RANK_COMMANDS = {  # commands other than train; independent of the stage
    "eval": Stage("megarl.stages.evaluation:run", needs_engine=True),
    "parity": Stage("megarl.commands.rank_checks:parity", needs_engine=True),
    "sync": Stage("megarl.commands.rank_checks:sync", needs_engine=True),
    "check": Stage("megarl.commands.rank_checks:layouts"),
}


def program(stage: str, command: str) -> Stage:
    """Returns the program of a rank: the stage for `train`, otherwise the command."""
    return STAGES[stage] if command == "train" else RANK_COMMANDS[command]


def needs_engine(stage: str, command: str) -> bool:
    """Returns True if the stage or the command needs an engine."""
    return STAGES[stage].needs_engine or program(stage, command).needs_engine
