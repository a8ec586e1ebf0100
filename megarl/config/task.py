"""Sections `task` and `eval`: the problems to train on and to evaluate on, and their check."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.section import NAME, Config, Options, Section, refuse

AnswerPlace = Literal["auto", "tag", "boxed", "last_line", "last_number", "whole"]


class MixturePart(Section):
    """One task of a mixture."""

    name: str
    """Task, as in task.name."""
    options: Options = {}
    """Options of this task."""
    weight: PositiveFloat = 1.0
    """Weight of this task in the mixture, relative to the other parts."""


class Task(Section):
    """Source of prompts and answers, and their formatting."""

    name: str = "reasoning_gym:chain_sum"
    """reasoning_gym:NAME, jsonl:FILE, hf:DATASET, or package.module:function
    (megarl.data.tasks).
    """
    options: Options = {}
    """Options passed to the task, for example those of reasoning-gym."""
    mixture: tuple[MixturePart, ...] = ()
    """Several tasks, interleaved by weight; replaces name and options."""
    template: Literal["chat", "plain"] | None = None
    """Template of prompts; null: chat if the tokenizer has one."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """System message for problems whose messages have none."""
    template_args: Options = {}
    """Variables of the chat template, for example {enable_thinking: false}."""
    answer: AnswerPlace = "auto"
    """Part of a response, after any thinking, that `accuracy` judges. tag: the text between
    <answer> and </answer>; boxed: the content of \\\\boxed{}; last_line: the whole last line;
    last_number: the last number with adjacent characters, for example 3/7; whole: the whole
    response; auto: tag or boxed if present, otherwise whole."""
    seed: int = 0
    """Seed of generated problems, and of the order of stored problems."""
    size: PositiveInt | None = None
    """Number of problems to use; null: the whole task."""
    ignore_media: bool = False
    """Trains on the text of data and models that also have images, audio or video; false: such data
    and models are refused."""


class EvalSet(Section):
    """An additional set of evaluation problems. Stored problems (jsonl:, hf:) in such a set are
    never trained on."""

    name: str = Field(pattern=NAME)
    """Prefix of the metrics of this set: <name>/mean@4."""
    task: str | None = None
    """Task, as in task.name, all of whose problems are used; null: the held-out problems of
    `task`."""
    options: Options = {}
    """Options of this task."""
    size: PositiveInt = 256
    """Maximum number of problems."""
    samples: PositiveInt = 1
    """Number of samples per problem."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; null: rollout.temperature."""


class Eval(Section):
    """Evaluation on held-out problems."""

    every: NonNegativeInt = 0
    """Steps between evaluations; one also runs at the start and at the end. 0: no evaluation."""
    size: NonNegativeInt = 256
    """Maximum number of held-out problems of `task`; 0: only evaluate on `sets`."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the held-out problems; 0: greedy."""
    sets: tuple[EvalSet, ...] = ()
    """Problem sets in addition to the held-out problems of `task`."""


def check_problems(config: Config) -> None:
    """Raises ValueError if the mixture or the evaluation sets contradict other settings, or there
    is nothing to evaluate.
    """
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
