"""`task` and `eval`: the problems that are trained on, and those that measure the policy."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.section import NAME, Config, Options, Section, refuse

AnswerPlace = Literal["auto", "tag", "boxed", "last_line", "last_number", "whole"]


class MixturePart(Section):
    """One task of a mixture."""

    name: str
    """Task, as in task.name."""
    options: Options = {}
    """Settings of this task."""
    weight: PositiveFloat = 1.0
    """Share of the prompts, relative to the other parts."""


class Task(Section):
    """Where prompts and answers come from, and how they become text."""

    name: str = "reasoning_gym:chain_sum"
    """reasoning_gym:NAME, jsonl:FILE, hf:DATASET, or package.module:function
    (megarl.data.tasks).
    """
    options: Options = {}
    """Settings that are passed to the task, for example reasoning-gym's."""
    mixture: tuple[MixturePart, ...] = ()
    """Several tasks, interleaved by weight; instead of name and options."""
    template: Literal["chat", "plain"] | None = None
    """Template of prompts; null: chat if the tokenizer has one."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """System message, unless a problem's messages have one."""
    template_args: Options = {}
    """Variables of the chat template, for example {enable_thinking: false}."""
    answer: AnswerPlace = "auto"
    """Part of a response, after any thinking, that `accuracy` judges. tag: between <answer> and
    </answer>; boxed: within \\\\boxed{}; last_line: alone on it; last_number: with all that is
    written onto it, as 3/7; whole; auto: tag or boxed if present, else whole."""
    seed: int = 0
    """Seed of generated problems, and of the order of stored ones."""
    size: PositiveInt | None = None
    """Problems that are used; null: the whole task."""
    ignore_media: bool = False
    """Train on the text of rows, and of models, that also have images, audio or video; false: they
    are refused."""


class EvalSet(Section):
    """More problems to evaluate on. Stored problems (jsonl:, hf:) are then never trained on."""

    name: str = Field(pattern=NAME)
    """Name in its metrics: <name>/mean@4."""
    task: str | None = None
    """Task as in task.name, all its problems; null: the held-out problems of `task`."""
    options: Options = {}
    """Settings of this task."""
    size: PositiveInt = 256
    """Problems, at most."""
    samples: PositiveInt = 1
    """Samples of each problem."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; null: rollout.temperature."""


class Eval(Section):
    """Evaluation on held-out problems."""

    every: NonNegativeInt = 0
    """Steps from one evaluation to the next, and one at the start and the end; 0: none."""
    size: NonNegativeInt = 256
    """Held-out problems of `task`, at most; 0: only those of `sets`."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the held-out problems; 0: greedy."""
    sets: tuple[EvalSet, ...] = ()
    """Problems in addition to the held-out ones of `task`."""


def check_problems(config: Config) -> None:
    """Raises ValueError if the mixture or the evaluation sets contradict other settings."""
    for key in ("name", "options", "size") if config.task.mixture else ():
        value = getattr(config.task, key)
        if value != getattr(Task(), key):
            raise ValueError(f"task.{key}={value} and task.mixture are both set; keep one")
    if config.eval.size == 0 and not config.eval.sets:
        raise ValueError(
            "eval.size=0 and eval.sets is empty, so there is nothing to evaluate; set one"
        )
    names = [part.name for part in config.eval.sets]
    for part in config.eval.sets:
        refuse(
            (names.count(part.name) > 1, f"eval.sets has two sets named {part.name}; rename one"),
            (
                part.options and part.task is None,
                f"eval.sets: {part.name} has options={part.options}, but no task; set its task",
            ),
            (
                part.samples > 1 and part.temperature == 0,
                f"eval.sets: {part.name} draws samples={part.samples} at temperature=0, which are "
                "all equal; set samples=1, or a temperature",
            ),
        )
