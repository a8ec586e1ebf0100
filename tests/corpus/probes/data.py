"""What the readers of rows return, and what tokenizers make of them: of the task of task.yaml, and of the model in model/."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from megarl.config.schema import Task
from megarl.data.conversations import example_encoder
from megarl.data.prompts import PromptStream
from megarl.data.rows import Problem
from megarl.data.tasks import load_sources
from megarl.data.tokenizer import load_tokenizer, prompt_encoder


def task_of(folder: Path) -> Task:
    import yaml

    return Task(**yaml.safe_load((folder / "task.yaml").read_text()))


def problems(folder: Path) -> list[Problem]:
    (source,) = load_sources(task_of(folder))
    return [source.problem(number) for number in range(source.size or 0)]


def answers(folder: Path) -> list[Any]:
    """The answers of the problems, in order."""
    return [problem.answer for problem in problems(folder)]


def questions(folder: Path) -> list[Any]:
    return [problem.text for problem in problems(folder)]


def prompt(folder: Path) -> str:
    """The first prompt as the engine gets it, with special tokens."""
    tokenizer = load_tokenizer(folder / "model")
    task = task_of(folder)
    return tokenizer.inner.decode(prompt_encoder(tokenizer, task)(problems(folder)[0].question))


def learned(folder: Path) -> list[str]:
    """What is learned of each row: its text, with special tokens."""
    task = task_of(folder)
    tokenizer = load_tokenizer(folder / "model", template=task.template)
    example = example_encoder(tokenizer, task, ("assistant",))
    texts = []
    for problem in problems(folder):
        tokens, mask = example(problem)
        if mask:
            tokens = [token for token, is_learned in zip(tokens, mask, strict=True) if is_learned]
        else:
            tokens = tokenizer.encode_answer(problem.answer)
        texts.append(tokenizer.inner.decode(tokens))
    return texts


def resumed(folder: Path) -> str:
    """What a run says that goes on after two prompts, once after.py has changed the data; "" if nothing."""
    stream = partial(PromptStream, encode=lambda problem: ((1,), ()), max_tokens=9)
    before = stream(load_sources(task_of(folder)))
    before.take(2)
    state = before.state()
    exec((folder / "after.py").read_text(), {})
    after = load_sources(task_of(folder))
    stream(after, accepts_changes=True).restore(state)
    try:
        stream(after).restore(state)
    except ValueError as error:
        return str(error).partition("; ")[0]
    return ""
