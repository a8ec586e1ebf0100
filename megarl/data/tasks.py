"""Sources of problems: `reasoning_gym:<name>`, `jsonl:FILE`, or a user's function. No torch.

    config.Task --load_task(split)--> Source: problem(index) -> Problem

Training and held-out problems never share a question: a hash of its text assigns a generated problem to a split; the
held-out problems of a file come from a second file and are removed from the first.
"""

from __future__ import annotations

import hashlib
import json
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megarl.config.schema import Task
from megarl.data.user_code import import_function, is_dotted

Split = Literal["train", "eval"]
Question = str | tuple[Mapping[str, str], ...]  # text, or chat messages

HELD_OUT = 5  # one question in five belongs to "eval"
ATTEMPTS = 1000  # to draw a problem of the requested split
QUESTION_KEYS = ("prompt", "question", "messages")


@dataclass(frozen=True, slots=True)
class Problem:
    """Reward functions get the fields of `extra` by name; a function ``extra["score"]`` is the task's own judge."""

    question: Question
    answer: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """``problem(i)`` for 0 <= i < `size`; always the same problem, on every rank."""

    problem: Callable[[int], Problem]
    size: int | None  # None: endless


def load_task(task: Task, split: Split = "train") -> Source:
    """Loads the problems of a task's split. Raises ValueError or FileNotFoundError with the values and the remedy."""
    kind, _, rest = task.name.partition(":")
    if kind == "reasoning_gym":
        source = _reasoning_gym(rest, task, split)
    elif kind == "jsonl":
        source = _jsonl(rest, task, split)
    elif is_dotted(task.name):
        source = _user_function(task, split)
    else:
        raise ValueError(
            f"task.name={task.name!r} is not a task; write reasoning_gym:<name>, jsonl:FILE, or package.module:function"
        )
    if source.size == 0:
        raise ValueError(f"task.name={task.name!r} has no {split} problems; add at least one")
    if split == "eval" or task.size is None:
        return source
    return Source(source.problem, task.size if source.size is None else min(task.size, source.size))


def check_task(task: Task, *, held_out: bool = False) -> Problem:
    """Makes the first problem of each split, so that errors surface before anything starts; raises like `load_task`."""
    if held_out:
        load_task(task, "eval").problem(0)
    return load_task(task).problem(0)


def _reasoning_gym(name: str, task: Task, split: Split) -> Source:
    """Hashes (index, attempt) to a dataset index, for attempt 0, 1, ..., until the question belongs to `split`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # from a package it imports, once per installation
            import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"task.name={task.name!r} needs reasoning-gym ({error}); pip install reasoning-gym") from None
    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {len(DATASETS)} others, such as chain_sum"
        raise ValueError(f"task.name={task.name!r}: reasoning-gym has no {name!r}; {hint}")
    try:
        dataset = reasoning_gym.create_dataset(name, **({"seed": 0} | task.options))
    except (TypeError, AssertionError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"reasoning_gym:{name} rejects task.options={task.options}: {reason}") from None
    num_indices = _num_indices(dataset) if "size" not in task.options else len(dataset)

    def problem(index: int) -> Problem:
        for attempt in range(ATTEMPTS):
            entry = dataset[hash31(f"{task.seed}/{split}/{index}/{attempt}") % num_indices]
            if _split_of(entry["question"]) == split:
                score = partial(dataset.score_answer, entry=entry)
                return Problem(entry["question"], _text(entry["answer"]), {"score": score})
        raise ValueError(
            f"task.name={task.name!r} gave no {split} problem in {ATTEMPTS} draws: it has too few distinct questions "
            f"to hold some out; widen task.options={task.options}"
        )

    return Source(problem, None)


def _num_indices(dataset: Any) -> int:
    """The number of indices a dataset accepts: nearly all accept any index, a few are lists."""
    try:
        dataset[2**31 - 1]
    except (IndexError, KeyError):
        return len(dataset)
    return 2**31


def hash31(text: str) -> int:
    """Hashes `text` to 31 bits, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") & 0x7FFFFFFF


def _split_of(question: str) -> Split:
    return "eval" if hash31(f"held out? {question}") % HELD_OUT == 0 else "train"


def _text(answer: Any) -> str | None:
    return None if answer is None else str(answer)


def _jsonl(file: str, task: Task, split: Split) -> Source:
    if unknown := set(task.options) - {"eval_file"}:
        names = ", ".join(sorted(unknown))
        raise ValueError(f"task.options has {names}, but task.name={task.name!r} takes eval_file only; remove {names}")
    held_out = task.options.get("eval_file")
    if split == "eval":
        if held_out is None:
            raise ValueError(f"task.name={task.name!r} has no held-out problems; set task.options.eval_file=FILE")
        file = str(held_out)
    problems = _read_jsonl(Path(file))
    if split == "train" and held_out is not None:
        questions = {json.dumps(problem.question) for problem in _read_jsonl(Path(str(held_out)))}
        problems = [problem for problem in problems if json.dumps(problem.question) not in questions]
    return Source(problems.__getitem__, len(problems))


def _read_jsonl(file: Path) -> list[Problem]:
    if not file.is_file():
        raise FileNotFoundError(f"task file {file} does not exist; use a file with one JSON object per line")
    problems = []
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file} line {number} is not JSON ({error}): {_short(line)}; fix the line") from None
            problems.append(_problem(row, f"{file} line {number}"))
    if not problems:
        raise ValueError(f"{file} has no problems; write one JSON object per line, such as {_EXAMPLE}")
    return problems


def _user_function(task: Task, split: Split) -> Source:
    """``f(split=..., **options)`` returns a sequence of rows like those of a jsonl file, which may be lazy."""
    function = import_function(task.name, setting="task.name")
    try:
        rows = function(split=split, **task.options)
    except (TypeError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"{task.name} rejects task.options={task.options}: {reason}; change them") from None
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        raise ValueError(
            f"task.name={task.name!r} returned a {type(rows).__name__}; return a sequence of rows, such as [{_EXAMPLE}]"
        )
    return Source(lambda index: _problem(rows[index], f"{task.name} row {index}"), len(rows))


_EXAMPLE = '{"prompt": "1 + 1 =", "answer": "2"}'


def _problem(row: Any, where: str) -> Problem:
    """Makes a problem of a row; all fields but question and answer go into `extra`. `where` appears in errors."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is a {type(row).__name__}, not an object; write {_EXAMPLE}")
    keys = [key for key in QUESTION_KEYS if key in row]
    if len(keys) != 1:
        present = ", ".join(keys) or ", ".join(map(str, row)) or "nothing"
        raise ValueError(f"{where} needs exactly one of {', '.join(QUESTION_KEYS)}; it has {present}")
    question = row[keys[0]]
    if keys[0] == "messages":
        if not isinstance(question, list) or not question or not all(map(_is_message, question)):
            raise ValueError(
                f'{where}: messages must be a list of {{"role": ..., "content": ...}}, not {_short(question)}'
            )
        question = tuple(question)
    elif not isinstance(question, str) or not question:
        raise ValueError(f"{where}: {keys[0]} must be text, not {_short(question)}")
    extra = {str(key): value for key, value in row.items() if key not in (keys[0], "answer")}
    return Problem(question, _text(row.get("answer")), extra)


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _short(value: Any) -> str:
    text = repr(value.strip() if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def random_tokens(
    *, split: Split, vocab: int, size: int = 4096, least: int = 2, most: int = 8, first: int = 4, seed: int = 0
) -> list[dict[str, str]]:
    """Draws prompts of `least` to `most` random token ids, none below `first`, for models without a tokenizer."""
    draw = random.Random(f"{split}/{seed}")
    return [
        {"prompt": " ".join(str(draw.randrange(first, vocab)) for _ in range(draw.randint(least, most)))}
        for _ in range(size)
    ]
