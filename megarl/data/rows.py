"""Reads rows of files and datasets as problems. Does not import torch.

    bytes --read_rows | read_table--> (where, row) --read_problem, by Columns--> Problem

This module lists what a row may contain and refuses everything else with file and line, because a
prompt without one of its parts is a different prompt.
"""

import csv
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import reduce
from itertools import chain, compress, islice
from typing import Any

from pydantic import BaseModel, Field, field_validator

from megarl.config.section import Pattern, Section, not_misread, short
from megarl.data.media import MEDIA, PLACEHOLDER, refuse_media
from megarl.platform.json_text import parse_json

Fields = Mapping[str, Any]  # named values of a row, a problem or a call
PlacedRow = tuple[str, Any]  # file and line, for errors; a row
ChatMessage = Mapping[str, Any]  # of a conversation: role, content and more
TextOrMessages = str | tuple[ChatMessage, ...]
PROMPT_TEXTS = ("prompt", "question", "problem")  # alternatives to `messages`
# columns with parts of the prompt, which are not passed to the chat template
PROMPT_PARTS = (
    "system",
    "system_prompt",
    "history",
    "tools",
    "functions",
    "documents",
    "chat_template_kwargs",
)
EXAMPLE = '{"prompt": "1 + 1 =", "answer": "2"}'
MESSAGES = '[{"role": "user", "content": "1 + 1 ="}, ...]'
# matches a whole text only, because a prompt may begin with a list
MESSAGES_AS_TEXT = re.compile(
    r"""\s*\[\s*\{\s*["'](role["'].*["']content|content["'].*["']role|from["'].*["']value"""
    r"""|value["'].*["']from)["']\s*:.*\}\s*\]\s*""",
    re.DOTALL,
)
NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,14})(\.[0-9]+)?")  # a CSV cell that is read as a number
# remedies for files that are not UTF-8, by their first bytes
UTF_16 = "it is UTF-16: convert it with iconv -f UTF-16 -t UTF-8"
ENCODINGS = {
    b"\xff\xfe": UTF_16,
    b"\xfe\xff": UTF_16,
    b"\x1f\x8b": "it is compressed: gunzip it",
    b"\x28\xb5": "it is compressed: unzstd it",
    b"PA": "it is Parquet: name it hf:FILE.parquet",
}
csv.field_size_limit(1 << 30)


class BadRow(ValueError):
    """Raised if a row cannot be read; the message names file and line."""


@dataclass(frozen=True)
class Problem:
    """A question with its reference answer.

    Reward functions get the fields of `extra` by name. A function ``extra["score"]`` is the task's
    own judge.
    """

    question: TextOrMessages
    answer: Any = None  # text; or a boolean, a list or an object of the file
    extra: Fields = field(default_factory=dict)
    where: str = field(default="a generated problem", compare=False)  # file and line, for errors

    @property
    def text(self) -> str:
        question = self.question
        if isinstance(question, str):
            return question
        return "\n".join(f"{m['role']}: {m['content']}" for m in question)


@dataclass(frozen=True)
class Source:
    """A sequence of problems: ``problem(i)`` for 0 <= i < `size` is the same on every rank."""

    problem: Callable[[int], Problem]
    size: int | None  # None: endless
    # returns all problems in order, faster than one by one; None: problems are generated
    scan: Callable[[], Iterable[Problem]] | None = None
    weight: float = 1.0  # weight in a mixture
    held_out: int = 0  # number of problems that `select` left out

    def problems(self) -> Iterable[Problem]:
        """Returns all problems of a finite source, or the first problem of an endless one."""
        if self.scan is not None:
            return islice(self.scan(), self.size)
        return map(self.problem, range(self.size or 1))

    def digest(self) -> str:
        """Returns a hash of the questions in order, or "" if they are generated."""
        if self.scan is None:
            return ""
        total = hashlib.sha256()
        for problem in self.problems():
            total.update(f"{len(problem.text)} {problem.text}".encode())
        return total.hexdigest()[:16]

    def select(self, keep: Sequence[bool]) -> "Source":
        """Returns a source of the problems whose entry in `keep` (one per problem) is True."""
        indices = list(compress(range(len(keep)), keep))
        return replace(
            self,
            problem=lambda index: self.problem(indices[index]),
            size=len(indices),
            scan=lambda: compress(self.problems(), keep),
            held_out=self.held_out + len(keep) - len(indices),
        )


class Columns(BaseModel):
    """The columns of stored problems that make up prompt and answer."""

    model_config = Section.model_config
    _not_misread = not_misread

    prompt: str | list[str] | None = None  # text or chat messages; several columns are joined
    # None: `answer`, if it exists. A dot enters a struct: reward_model.ground_truth
    answer: str | None = None
    # a regular expression; group 1 of the last match is the answer
    answer_pattern: Pattern | None = None

    @field_validator("answer_pattern")
    @classmethod
    def _pattern(cls, value: str | None) -> str | None:
        if value is not None and not re.compile(value).groups:
            raise ValueError("has no group; put parentheses around the answer")
        return value

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt or []

    def answer_in(self, row: Fields) -> Any:
        name = self.answer or "answer"
        path = [name] if name in row else name.split(".")
        return reduce(enter, path, row)

    def check(self, rows: Sequence[Fields], name: object) -> None:
        """Raises ValueError if a column of these options is in none of `rows`, the rows of the file
        `name`.
        """
        known = dict.fromkeys(chain.from_iterable(rows))
        absent = [f"prompt={column}" for column in self.prompts if column not in known]
        has_answer = any(self.answer_in(row) is not None for row in rows)
        if (self.answer or self.answer_pattern) and not has_answer:
            absent.append(f"answer={self.answer or 'answer'}")
        if absent:
            raise ValueError(
                f"task.options.{absent[0]} is not a column of {name}; choose from: "
                f"{', '.join(known)}"
            )


class FileOptions(Columns):
    """The task.options of a `jsonl:` task."""

    eval_file: str | None = None


class DatasetOptions(Columns):
    """The task.options of an `hf:` task."""

    split: str = "train"  # may be a slice, such as train[:1000]
    eval_split: str | None = None  # None: hold out some problems of `split`
    held_out: float = Field(default=0.05, ge=0, lt=1)  # share to hold out without eval_split
    config: str | None = None  # a subset: `name` of datasets.load_dataset
    # branch, tag or commit of a hub id; None: main. A run records the commit
    revision: str | None = None
    data_files: str | None = None  # a glob: download and read only these files


NO_OPTIONS = Columns()


def enter(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def listed(
    rows: Iterable[PlacedRow],
    columns: Columns,
    name: object,
    *,
    ignore_media: bool = False,
) -> Source:
    """Returns a source of the problems in `rows`, pairs (place, row) of the file or dataset `name`.

    Raises ValueError if there are no rows, a column is missing or a row is malformed.
    """
    rows = [*rows]
    if not rows:
        raise ValueError(
            f"{name} has no problems; write one JSON object per line, such as {EXAMPLE}"
        )
    columns.check([row for _, row in rows if isinstance(row, Mapping)], name)
    problems = [read_problem(row, where, columns, ignore_media=ignore_media) for where, row in rows]
    return Source(problems.__getitem__, len(problems), lambda: problems)


@contextmanager
def errors_of(where: str) -> Iterator[None]:
    """Prefixes the message of a ValueError or FileNotFoundError with `where` (a row or a config
    key), unless `where` is "".
    """
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        if not where:
            raise
        raise ValueError(f"{where}: {error}") from None


def read_rows(lines: Iterable[bytes], file: object) -> Iterator[PlacedRow]:
    """Yields (place, value) for each line of JSON, or for each element of a single JSON list.

    Raises ValueError with file and line.
    """
    texts = ((where, text) for where, text in utf8_lines(lines, file) if text.strip())
    for number, (where, text) in enumerate(texts):
        if not number and text.lstrip().startswith("["):
            whole = "".join([text, *(rest for _, rest in texts)])
            for index, row in enumerate(parse_json(whole, file)):
                yield f"{file}: row {index}", row
            return
        try:
            row = parse_json(text, where)
        except ValueError as error:
            raise BadRow(f"{error}: {short(text.strip())}; fix the line") from None
        yield where, row


def utf8_lines(lines: Iterable[bytes], file: object) -> Iterator[tuple[str, str]]:
    """Yields (place, text) for each line, without a byte order mark. Raises BadRow."""
    for number, line in enumerate(lines, start=1):
        where = f"{file}: line {number}"
        try:
            yield where, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            remedy = "convert the file, for example: iconv -f CP1252 -t UTF-8"
            if number == 1:
                remedy = ENCODINGS.get(line[:2], remedy)
            raise BadRow(
                f"{where} is not UTF-8 (byte 0x{line[error.start]:02x} at {error.start}); {remedy}"
            ) from None


def read_table(
    lines: Iterable[bytes], file: object, columns: Columns, separator: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, {column: cell}) for each row of CSV.

    An empty cell is None. Other cells that look like numbers are numbers, except in columns of the
    prompt and the answer. Raises ValueError with file and line.
    """
    texts = {*PROMPT_TEXTS, *columns.prompts, columns.answer or "answer"}
    texts_of_lines = (text for _, text in utf8_lines(lines, file))
    table = csv.DictReader(texts_of_lines, delimiter=separator, strict=True)
    try:
        names = [*filter(None, table.fieldnames or ())]
        for name in names:
            if names.count(name) > 1:
                raise BadRow(f"{file}: the header names {short(name)} twice; rename one")
        for cells in table:
            where = f"{file}: line {table.line_num}"
            if None in cells:
                raise BadRow(
                    f"{where} has {len(cells[None])} cells more than the header names, first "
                    f"{short(cells[None][0])}; put a text with commas or line breaks in quotes"
                )
            row = {}
            for key, cell in cells.items():
                is_number = key not in texts and NUMBER.fullmatch(cell or "")
                row[key] = parse_json(cell, where) if is_number else cell or None
            yield where, row
    except csv.Error as error:
        raise BadRow(f"{file}: line {table.line_num} is not CSV ({error}); correct it") from None


def read_problem(
    row: Any, where: str, columns: Columns = NO_OPTIONS, *, ignore_media: bool
) -> Problem:
    """Returns the problem of a row; fields other than question and answer go into `extra`.

    A null counts as absent. Raises ValueError if the row is malformed or has unsupported parts.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is a {type(row).__name__}, not an object; write {EXAMPLE}")
    present = [str(key) for key, value in row.items() if value is not None]
    keys = columns.prompts or [key for key in PROMPT_TEXTS if key in present]
    keys = keys or [key for key in ("messages",) if key in present]
    if len(keys) != 1 and not columns.prompt:
        raise ValueError(
            f"{where} needs exactly one of {', '.join(PROMPT_TEXTS)}, messages; it has "
            f"{', '.join(keys or present) or 'nothing'}; write text, or {MESSAGES}, or set "
            "task.options.prompt to the columns of the prompt"
        )
    extra = {str(key): row[key] for key in row if key not in (*keys, columns.answer or "answer")}
    for name in () if columns.prompt else PROMPT_PARTS:
        if extra.get(name) and extra[name] != "[]":
            raise ValueError(
                f"{where} has {name}={short(extra[name])}, which would not be in the prompt; write "
                "it into the prompt, as the first of its messages, for one (or set "
                "task.options.prompt to all columns of the prompt), or rename the column if only "
                "rewards read it"
            )
    refuse_media(where, [name for name in MEDIA if extra.get(name)], ignore=ignore_media)
    question = _joined([row.get(key) for key in keys])
    question = read_content(question, f"{where}: the prompt", ignore_media=ignore_media)
    answer = columns.answer_in(row)
    if columns.answer_pattern:
        text = "" if isinstance(answer, list | Mapping | None) else str(answer)
        matches = [*re.finditer(columns.answer_pattern, text)]
        if not matches or matches[-1][1] is None:
            raise ValueError(
                f"{where}: task.options.answer_pattern={columns.answer_pattern!r} does not match "
                f"the answer {str(answer)[-60:]!r}; change the pattern"
            )
        answer = matches[-1][1].strip()
    if answer is None:  # verl's format
        answer = enter(extra.get("reward_model"), "ground_truth")
    with errors_of(f"{where}: the answer"):
        answer = reference(answer)
    problem = Problem(question, answer, extra, where)
    try:
        f"{problem.text} {problem.answer}".encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} has half of a surrogate pair, which no tokenizer can read: "
            f"{short(error.object[max(0, error.start - 10) : error.end + 10])}; remove it"
        ) from None
    return problem


def _joined(values: list[Any]) -> Any:
    """Joins the texts of several columns with blank lines, or concatenates their messages."""
    values = [value for value in values if value]  # Alpaca's input may be empty
    if len(values) == 1:
        return values[0]
    if values and all(isinstance(value, list) for value in values):
        return [*chain.from_iterable(values)]
    if values and all(isinstance(value, str) for value in values):
        return "\n\n".join(values)
    return values or None


def read_content(value: Any, where: str, *, ignore_media: bool) -> TextOrMessages:
    """Returns `value` as non-blank text or as messages. Raises ValueError for anything else."""
    if isinstance(value, list | tuple) and value:
        return tuple(read_messages(value, where, ignore_media=ignore_media))
    if not isinstance(value, str) or not value.strip() or MESSAGES_AS_TEXT.fullmatch(value):
        raise ValueError(
            f"{where} must be text, or messages {MESSAGES} (a list, not its text), not "
            f"{short(value)}"
        )
    return PLACEHOLDER.sub("", value) if ignore_media else value


def reference(value: Any) -> Any:
    """Returns a reference as text; a number is written without exponent and without loss.

    Booleans, lists and objects stay as they are; null, NaN and blank texts become None. Raises
    ValueError for bytes and infinite numbers.
    """
    if value is None or value != value or not str(value).strip():
        return None
    if isinstance(value, str | bool | list | Mapping):
        return value
    if isinstance(value, float):
        value = Decimal(repr(float(value)).removesuffix(".0"))
    text = f"{value:f}" if isinstance(value, Decimal) else str(value)
    if isinstance(value, bytes) or "Infinity" in text:
        raise ValueError(
            f"{short(value)} is neither text nor a finite number; write it, or store its column, "
            "as text"
        )
    return text.removesuffix(" 00:00:00")  # a date is stored with a time


def reference_text(answer: Any) -> str:
    """Returns the text of a reference, to compare with a response or to train on.

    Raises ValueError for a list or an object, whose meaning only a reward function knows.
    """
    if isinstance(answer, bool):
        return str(answer).lower()
    if not isinstance(answer, str):
        raise ValueError(
            f"the answer {short(answer)} is a {type(answer).__name__}, not one text; write a text, "
            "or judge it by a reward function of your own"
        )
    return answer


def read_messages(
    values: Iterable[Any], where: str, *, ignore_media: bool
) -> Iterator[dict[str, Any]]:
    """Yields messages without keys that are null or empty lists, and with their content as text.

    Raises ValueError if a value is not a message or has content other than text.
    """
    for number, value in enumerate(values, start=1):
        place = f"{where}: message {number}"
        message = {}
        if isinstance(value, Mapping):
            message = {key: item for key, item in value.items() if item is not None and item != []}
        content = message.get("content")
        if isinstance(content, list):
            texts = []
            for part in content:
                kind = part.get("type") if isinstance(part, Mapping) else None
                if kind == "text" and isinstance(part.get("text"), str):
                    texts.append(part["text"])
                    refuse_media(place, [*filter(part.get, MEDIA)], ignore=ignore_media)
                elif str(kind) in MEDIA:
                    refuse_media(place, [str(kind)], ignore=ignore_media)
                else:
                    raise ValueError(f"{place} has content {short(part)}; only text can be read")
            content = "\n".join(texts)  # vLLM joins parts like this
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"{place} is {short(value)}; messages are {MESSAGES}: convert ShareGPT's from and "
                "value to role and content, and remove rows with tool calls but no text"
            )
        if ignore_media:
            content = PLACEHOLDER.sub("", content)
        yield {**message, "content": content}


def messages_of(content: TextOrMessages, role: str = "user") -> list[ChatMessage]:
    return [{"role": role, "content": content}] if isinstance(content, str) else [*content]
