"""Rows of files and datasets, as problems. No torch.

    bytes --read_rows--> (where, row) --read_problem--> Problem

What a row may have is listed here; the rest is refused with its file and line, as a prompt that
has lost a part is another prompt.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import compress
from typing import Any

from megarl.data.media import MEDIA, PLACEHOLDER, refuse_media
from megarl.platform.json_text import parse_json

Question = str | tuple[Mapping[str, str], ...]  # text, or chat messages
QUESTION_KEYS = ("prompt", "question", "problem", "messages")
# columns that are parts of the prompt, which no template would get
PROMPT_PARTS = ("system", "system_prompt", "history", "tools", "functions")
EXAMPLE = '{"prompt": "1 + 1 =", "answer": "2"}'
MESSAGES = '[{"role": "user", "content": "1 + 1 ="}, ...]'


class BadRow(ValueError):
    """A row cannot be read; the message names its place."""


@dataclass(frozen=True)
class Problem:
    """Reward functions get the fields of `extra` by name; a function ``extra["score"]`` is the
    task's own judge.
    """

    question: Question
    answer: Any = None  # text; or a boolean, a list or an object, as the file has it
    extra: Mapping[str, Any] = field(default_factory=dict)
    where: str = field(default="a generated problem", compare=False)  # file and line, for errors

    @property
    def text(self) -> str:
        question = self.question
        if isinstance(question, str):
            return question
        return "\n".join(f"{m['role']}: {m['content']}" for m in question)


@dataclass(frozen=True)
class Source:
    """``problem(i)`` for 0 <= i < `size`; always the same problem, on every rank."""

    problem: Callable[[int], Problem]
    size: int | None  # None: endless
    # all problems in order, faster than one by one; if the argument is False, only their questions
    scan: Callable[[bool], Iterable[Problem]] | None = None
    weight: float = 1.0  # in a mixture
    held_out: int = 0  # training problems that were removed because they are evaluated on

    def problems(self, whole: bool = True) -> Iterable[Problem]:
        """All problems of a finite source, or only their questions; the first of an endless one."""
        return self.scan(whole) if self.scan else map(self.problem, range(self.size or 1))

    def digest(self) -> str:
        """Hashes the questions in order; "" for those that are generated."""
        total = hashlib.sha256()
        for problem in self.problems(whole=False) if self.scan else ():
            total.update(f"{len(problem.text)} {problem.text}".encode())
        return total.hexdigest()[:16] if self.scan else ""

    def select(self, keep: Sequence[bool]) -> "Source":
        """The problems whose entry in `keep`, one per problem, is True."""
        indices = list(compress(range(len(keep)), keep))
        return replace(
            self,
            problem=lambda index: self.problem(indices[index]),
            size=len(indices),
            scan=lambda whole: compress(self.problems(whole), keep),
        )


def listed(problems: list[Problem]) -> Source:
    return Source(problems.__getitem__, len(problems), lambda whole: problems)


@contextmanager
def errors_of(where: str) -> Iterator[None]:
    """Names the row, or the part of the config, that an error is of; `where` "": it does."""
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        if not where:
            raise
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"{where}: {error}") from None


def read_rows(lines: Iterable[bytes], file: object) -> Iterator[tuple[str, Any]]:
    """Yields the place and the value of each line of JSON, or of each element of one JSON list.

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
            raise BadRow(f"{error}: {short(text)}; fix the line") from None
        yield where, row


def utf8_lines(lines: Iterable[bytes], file: object) -> Iterator[tuple[str, str]]:
    """Yields the place and the text of each line; a byte order mark is no part of the first."""
    for number, line in enumerate(lines, start=1):
        where = f"{file}: line {number}"
        try:
            yield where, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise BadRow(
                f"{where} is not UTF-8 (byte 0x{line[error.start]:02x} at {error.start}); convert "
                "the file, for example: iconv -f CP1252 -t UTF-8"
            ) from None


def read_problem(row: Any, where: str, *, ignore_media: bool = False) -> Problem:
    """Makes a problem of a row; all fields but question and answer go into `extra`.

    A null counts as absent. Raises ValueError.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is a {type(row).__name__}, not an object; write {EXAMPLE}")
    keys = [key for key in QUESTION_KEYS if row.get(key) is not None]
    if len(keys) != 1:
        present = [str(key) for key, value in row.items() if value is not None]
        raise ValueError(
            f"{where} needs exactly one of {', '.join(QUESTION_KEYS)}; it has "
            f"{', '.join(keys or present) or 'nothing'}; write text, or {MESSAGES}"
        )
    extra = {str(key): value for key, value in row.items() if key not in (keys[0], "answer")}
    return make_problem(row[keys[0]], row.get("answer"), extra, where, ignore_media=ignore_media)


def make_problem(
    question: Any,
    answer: Any,
    extra: Mapping[str, Any],
    where: str,
    *,
    ignore_media: bool = False,
    is_chosen: bool = False,
) -> Problem:
    """`is_chosen`: the columns of the prompt are configured, so that no other is a part of it."""
    for name in () if is_chosen else extra:
        if name in PROMPT_PARTS and extra[name]:
            raise ValueError(
                f"{where} has {name}={short(extra[name])}, which would not be in the prompt; write "
                "it into the prompt, as the first of its messages, for one (of an hf: task, set "
                "task.options.prompt to all columns of the prompt), or rename the column if only "
                "rewards read it"
            )
    media = [name for name in extra if name in MEDIA and extra[name]]
    refuse_media(where, media, ignore=ignore_media)
    if isinstance(question, list) and question:
        question = tuple(read_messages(question, where, ignore_media=ignore_media))
    elif not isinstance(question, str) or not question.strip():
        raise ValueError(
            f"{where}: the prompt must be text, or messages {MESSAGES}, not {short(question)}"
        )
    elif ignore_media:
        question = PLACEHOLDER.sub("", question)
    judged = extra.get("reward_model")
    if answer is None and isinstance(judged, Mapping):  # as verl has it
        answer = judged.get("ground_truth")
    problem = Problem(question, reference(answer), extra, where)
    try:
        f"{problem.text} {problem.answer}".encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} has half of a surrogate pair, which no tokenizer can read: "
            f"{short(error.object[max(0, error.start - 10) : error.end + 10])}; remove it"
        ) from None
    return problem


def reference(value: Any) -> Any:
    """Returns a reference as text: a number without exponent, as exact as it was read.

    Booleans, lists and objects stay; null and NaN are None.
    """
    if isinstance(value, str | bool | list | Mapping):
        return value
    if value is None or value != value:
        return None
    if isinstance(value, float):
        value = Decimal(repr(value).removesuffix(".0"))
    if isinstance(value, Decimal):
        return f"{value:f}"
    return str(value).removesuffix(" 00:00:00")  # of a date


def reference_text(answer: Any) -> str:
    """Returns what a response is compared with, or taught; raises ValueError for a list or an
    object, of which only a reward function knows what they mean.
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
    values: Iterable[Any], where: str, *, ignore_media: bool = False
) -> Iterator[dict[str, Any]]:
    """Yields messages without the keys that are null, their content as one text.

    Raises ValueError for what is no message, or cannot be rendered as text.
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
                elif str(kind) in MEDIA:
                    refuse_media(place, [str(kind)], ignore=ignore_media)
                else:
                    raise ValueError(f"{place} has content {short(part)}; only text can be read")
            content = "\n".join(texts)  # as vLLM does
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"{place} is {short(value)}; messages are {MESSAGES}: convert ShareGPT's from and "
                "value to role and content, and remove rows with tool calls but no text"
            )
        if ignore_media:
            content = PLACEHOLDER.sub("", content)
        yield {**message, "content": content}


def messages_of(question: Question) -> list[Mapping[str, str]]:
    return [{"role": "user", "content": question}] if isinstance(question, str) else [*question]


def short(value: Any) -> str:
    text = repr(value.strip() if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."
