"""Sources of problems: `reasoning_gym:<name>`, `jsonl:FILE`, `hf:DATASET`, or a user's function.

Does not import torch.

    config.Task --load_sources(split)--> Source, or one for each part of a mixture
    Source.problem(index) -> Problem

Training and held-out problems never share a question. For generated problems, and for datasets
without `eval_split`, a hash of the question selects the split. If a second file or split has the
held-out problems, they are removed from the first.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from megarl.config.schema import Eval, EvalSet, Task
from megarl.config.section import did_you_mean, validate_options
from megarl.data.hf_dataset import FORMATS, load_rows
from megarl.data.rows import (
    EXAMPLE,
    DatasetOptions,
    FileOptions,
    Problem,
    Source,
    errors_of,
    listed,
    messages_of,
    read_problem,
    read_rows,
)
from megarl.data.task_judge import TaskJudge, import_reasoning_gym
from megarl.data.user_code import import_function, is_dotted

Split = Literal["train", "eval"]

HELD_OUT = 5  # one question in five belongs to "eval"
ATTEMPTS = 1000  # draws until a problem belongs to the requested split


def load_sources(
    task: Task, split: Split = "train", eval_tasks: Sequence[Task] = ()
) -> tuple[Source, ...]:
    """Loads a task, or every part of a mixture, without stored problems of `eval_tasks`.

    Problems that a hash holds out of one part of a mixture may still be in a part that is not split
    by a hash. Raises ValueError or FileNotFoundError.
    """
    parts = [
        (
            part.weight,
            task.model_copy(update={"name": part.name, "options": part.options, "mixture": ()}),
        )
        for part in task.mixture
    ] or [(1.0, task)]
    sources = []
    for number, (weight, part) in enumerate(parts):
        others = [other for _, other in parts if other is not part]
        with errors_of(f"task.mixture[{number}]" if task.mixture else ""):
            sources.append(replace(load_task(part, split, [*eval_tasks, *others]), weight=weight))
    return tuple(sources)


def eval_task(task: Task, part: EvalSet) -> Task:
    """Returns the task of an evaluation set; all problems of a stored one are evaluated."""
    if part.task is None:
        return task
    kind, _, rest = part.task.partition(":")
    whole = {
        "jsonl": {"eval_file": rest},
        "hf": {"eval_split": part.options.get("split", "train")},
    }.get(kind, {})
    return task.model_copy(
        update={"name": part.task, "options": whole | part.options, "mixture": (), "size": None}
    )


def load_task(task: Task, split: Split = "train", eval_tasks: Sequence[Task] = ()) -> Source:
    """Loads one task without its mixture; see `load_sources`."""
    kind, _, rest = task.name.partition(":")
    if load := {"reasoning_gym": _reasoning_gym, "jsonl": _jsonl, "hf": _dataset}.get(kind):
        source = load(rest, task, split)
    elif is_dotted(task.name) and Path(task.name).suffix not in FORMATS:
        source = _user_function(task, split)
    else:
        raise ValueError(
            f"task.name={task.name!r} is not a task; write reasoning_gym:<name>, jsonl:FILE, "
            "hf:DATASET, or package.module:function"
        )
    if split == "train" and kind in ("jsonl", "hf"):
        # questions of a second file or split count as equal whatever their white space and roles
        stored = [
            load_task(other, "eval")
            for other in (task, *eval_tasks)
            if other.options.keys() & {"eval_file", "eval_split"}
        ]
        held_out = set(map(_words_of, chain.from_iterable(part.problems() for part in stored)))
        if held_out:
            keep = [_words_of(problem) not in held_out for problem in source.problems()]
            source = source.select(keep)
    if source.size == 0:
        reason = f", as {source.held_out} are held out" if source.held_out else ""
        raise ValueError(
            f"task.name={task.name!r} has no {split} problems{reason}; add at least one"
        )
    if split == "eval" or task.size is None:
        return source
    return replace(source, size=min(task.size, source.size or task.size))


def check_tasks(
    task: Task,
    evaluated: Eval,
    *,
    held_out: bool,
    check: Callable[[Source, bool], object],
) -> Iterator[str]:
    """Loads all tasks once, so that errors surface before ranks start; yields notes for the user.

    `held_out` is True if the command evaluates. ``check(source, is_eval_set)`` is called for each
    source and reads all its problems. Raises ValueError or FileNotFoundError.
    """
    eval_tasks = [eval_task(task, part) for part in evaluated.sets]
    sets = [("eval", evaluated.size, task)] if evaluated.size else []
    for part, other in zip(evaluated.sets, eval_tasks, strict=True):
        sets.append((f"eval.sets: {part.name}", part.size, other))
    # evaluation sets first, because training problems are compared with them
    for key, size, other in sets if held_out else ():
        with errors_of(key):
            sources = load_sources(other, "eval")
            for source in sources:
                check(source, key != "eval")
        sizes = [source.size or size for source in sources]  # None: endless
        if sum(sizes) < size:
            yield f"{key}: size={size}, but there are {sum(sizes)} problems: all are used"
    sources = load_sources(task, eval_tasks=eval_tasks)
    for part, source in zip(task.mixture or [task], sources, strict=True):
        check(source, False)
        if source.held_out:
            yield (
                f"{part.name}: {source.held_out} of {source.held_out + (source.size or 0)} "
                "problems are held out for evaluation, and never trained on"
            )


def _words_of(problem: Problem) -> str:
    text = " ".join(message["content"] for message in messages_of(problem.question))
    return " ".join(text.split())


def _reasoning_gym(name: str, task: Task, split: Split) -> Source:
    """Returns an endless source of a reasoning-gym dataset.

    Hashes (index, attempt) to an index of the dataset, for attempt 0, 1, ..., until the question
    belongs to `split`.
    """
    reasoning_gym = import_reasoning_gym()
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        remedy = did_you_mean(
            name, DATASETS, f"it has {len(DATASETS)} others, such as chain_sum", most=3
        )
        raise ValueError(f"task.name={task.name!r}: reasoning-gym has no {name!r}; {remedy}")
    options = {"seed": 0} | task.options
    dataset = _call(task, lambda: reasoning_gym.create_dataset(name, **options))
    num_indices = len(dataset)
    if "size" not in task.options:
        with suppress(IndexError, KeyError):  # most datasets accept any index, a few are lists
            dataset[2**31 - 1]
            num_indices = 2**31

    def problem(index: int) -> Problem:
        for attempt in range(ATTEMPTS):
            entry = dataset[hash31(f"{task.seed}/{split}/{index}/{attempt}") % num_indices]
            is_eval = hash31(f"held out? {entry['question']}") % HELD_OUT == 0
            if is_eval == (split == "eval"):
                answer = None if entry["answer"] is None else str(entry["answer"])
                return Problem(
                    entry["question"], answer, {"score": TaskJudge(name, options, entry)}
                )
        raise ValueError(
            f"task.name={task.name!r} gave no {split} problem in {ATTEMPTS} draws: it has too few "
            f"distinct questions to hold some out; widen task.options={task.options}"
        )

    return Source(problem, None)


def hash31(text: str) -> int:
    """Returns a 31-bit hash of `text` that is the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") & 0x7FFFFFFF


def _dataset(name: str, task: Task, split: Split) -> Source:
    """Loads a split of a dataset; without `eval_split`, a hash of the question holds out some."""
    options = validate_options(DatasetOptions, task.options, f"task.name={task.name}")
    stored = (split == "eval" and options.eval_split) or options.split
    source = load_rows(name, options, stored, ignore_media=task.ignore_media)
    if options.eval_split is not None:
        return source
    is_eval = [
        hash31(f"held out? {_words_of(problem)}") < options.held_out * 2**31
        for problem in source.problems()
    ]
    if split == "train":
        return source.select([not value for value in is_eval])
    if not any(is_eval):
        raise ValueError(
            f"task.name={task.name!r} holds out none of its {source.size} problems with "
            f"task.options.held_out={options.held_out:g}; raise it, or set task.options.eval_split"
        )
    return source.select(is_eval)


def _jsonl(file: str, task: Task, split: Split) -> Source:
    options = validate_options(FileOptions, task.options, f"task.name={task.name}")
    path = Path(file)
    if split == "eval":
        if options.eval_file is None:
            raise ValueError(
                f"task.name={task.name!r} has no held-out problems; set task.options.eval_file=FILE"
            )
        path = Path(options.eval_file)
    if not path.is_file():
        raise FileNotFoundError(
            f"task file {path} does not exist; use a file with one JSON object per line"
        )
    with path.open("rb") as lines:
        return listed(read_rows(lines, path), options, path, ignore_media=task.ignore_media)


def _call(task: Task, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"{task.name} rejects task.options={task.options}: "
            f"{str(error) or type(error).__name__}; change them"
        ) from None


def _user_function(task: Task, split: Split) -> Source:
    """Loads the rows that a user's ``f(split=..., **options)`` returns: a sequence, possibly lazy,
    of rows like those of a jsonl file.
    """
    function = import_function(task.name, setting="task.name")
    rows = _call(task, lambda: function(split=split, **task.options))
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        raise ValueError(
            f"task.name={task.name!r} returned a {type(rows).__name__}; return a sequence of rows, "
            f"such as [{EXAMPLE}]"
        )

    def problem(index: int) -> Problem:
        where = f"{task.name} row {index}"
        return read_problem(rows[index], where, ignore_media=task.ignore_media)

    return Source(problem, len(rows))


def random_tokens(
    *,
    split: Split,
    vocab: int,
    size: int = 4096,
    least: int = 2,
    most: int = 8,
    first: int = 4,
    seed: int = 0,
) -> list[dict[str, str]]:
    """Returns rows with prompts of `least` to `most` random token ids, none below `first`, for
    models without a tokenizer.
    """
    draw = random.Random(f"{split}/{seed}")
    rows = []
    for _ in range(size):
        ids = [str(draw.randrange(first, vocab)) for _ in range(draw.randint(least, most))]
        rows.append({"prompt": " ".join(ids)})
    return rows


def ranked_tokens(
    *,
    split: Split,
    vocab: int,
    size: int = 4096,
    responses: int = 4,
    length: int = 8,
    first: int = 4,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Returns rows with prompts of random token ids and `responses` ranked responses of `length`
    ids each: the more even ids, the better.
    """
    draw = random.Random(f"ranked/{split}/{seed}")
    even = range(first + first % 2, vocab, 2)
    odd = range(first | 1, vocab, 2)
    rows = random_tokens(split=split, vocab=vocab, size=size, first=first, seed=seed)

    def response(num_even: int) -> str:
        tokens = draw.choices(even, k=num_even) + draw.choices(odd, k=length - num_even)
        return " ".join(map(str, draw.sample(tokens, length)))

    best_first = [sorted(draw.sample(range(length + 1), responses), reverse=True) for _ in rows]
    return [
        row | {"responses": [*map(response, counts)]}
        for row, counts in zip(rows, best_first, strict=True)
    ]
