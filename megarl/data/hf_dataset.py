"""Rows of `hf:` tasks: datasets on the Hugging Face hub, and local folders and files, read with
`datasets`. No torch.

    hub id --snapshot--> folder named by its commit -+-> JSON: rows.read_rows --+
    local folder or file ----------------------------+-> Arrow, memory-mapped --+-> DatasetRows

A hub id is downloaded first: offline, `datasets` itself would read whatever revision it prepared
last. JSON and the texts of CSV are read as they are: Arrow would take some for dates or numbers.
"""

import operator
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, ValidationError, field_validator

from megarl.config.section import Pattern, Section, did_you_mean
from megarl.data.media import FEATURE, refuse_media
from megarl.data.rows import (
    QUESTION_KEYS,
    BadRow,
    Problem,
    Source,
    listed,
    make_problem,
    read_rows,
    utf8_lines,
)
from megarl.platform.hub import Repository
from megarl.platform.packages import require

# of a single file
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
# as datasets reports no rows
EMPTY = ("corresponds to no data", "BatchSize must be greater than 0", "StopIteration")
BATCH = 1000  # rows read at once in a scan
SHORT_FLOATS = ("float16", "float32")  # read as float64, with digits that nobody wrote
MISSING = ("", "NaN", "nan", "null")  # cells of CSV


class DatasetOptions(Section):
    """task.options of an `hf:` task."""

    split: str = "train"  # may be sliced, as in train[:1000]
    eval_split: str | None = None  # None: some problems of `split` are held out
    held_out: float = Field(default=0.05, ge=0, lt=1)  # their share, without eval_split
    config: str | None = None  # a subset, as datasets.load_dataset's `name`
    # branch, tag or commit of a hub id; None: main. A run records the commit
    revision: str | None = None
    data_files: str | None = None  # a glob: reads, and downloads, only these files
    prompt: str | list[str] | None = None  # text or chat messages; several columns are joined
    # None: `answer`, if it exists. A dot enters a struct, as in reward_model.ground_truth
    answer: str | None = None
    # a regular expression; group 1 of its last match is the answer
    answer_pattern: Pattern | None = None

    @field_validator("answer_pattern")
    @classmethod
    def _pattern(cls, value: str | None) -> str | None:
        if value is not None and not re.compile(value).groups:
            raise ValueError("has no group; put parentheses around the answer")
        return value


def _joined(values: list[Any]) -> Any:
    """Joins the texts of several columns by an empty line, or concatenates their messages."""
    values = [value for value in values if value] or values  # Alpaca's input may be empty
    if all(isinstance(value, list) for value in values):
        return [*chain.from_iterable(values)]
    if all(isinstance(value, str) for value in values):
        return "\n\n".join(values)
    return values  # which is neither text nor messages


def _enter(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def parse_options(name: str, options: Mapping[str, Any]) -> DatasetOptions:
    """Raises ValueError for an unknown option or a wrong value."""
    try:
        return DatasetOptions.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            known = DatasetOptions.model_fields
            remedy = did_you_mean(key, known, f"it takes {', '.join(known)}")
            raise ValueError(
                f"task.options.{key} is not an option of task.name=hf:{name}; {remedy}"
            ) from None
        raise ValueError(
            f"task.options.{key}={first['input']!r} of task.name=hf:{name}: "
            f"{first['msg'].removeprefix('Value error, ')}"
        ) from None


def load_rows(
    name: str, options: DatasetOptions, split: str, *, ignore_media: bool = False
) -> Source:
    """Loads one split. Raises ValueError or FileNotFoundError with the value and the remedy."""
    dataset, places = _read(name, options, split)
    features: dict[str, Any] = {}
    is_listed = isinstance(dataset, list)
    if is_listed:
        for row in dataset:
            features |= {key: value for key, value in row.items() if value is not None}
    else:
        media = [key for key, kind in dataset.features.items() if FEATURE.search(repr(kind))]
        refuse_media(f"task.name=hf:{name}", media, ignore=ignore_media)
        dataset = dataset.remove_columns(media)
        features = dataset.features
    prompt, answer, dtype = _columns(name, options, features)
    others = [key for key in features if (key,) != answer and key not in prompt]
    pattern = options.answer_pattern

    def problem(index: int, row: Mapping[str, Any]) -> Problem:
        where = places[index] if places else f"hf:{name} split {split} row {index}"
        question = row.get(prompt[0])
        if len(prompt) > 1:
            question = _joined([row.get(column) for column in prompt])
        reference = None
        if answer:
            reference = reduce(_enter, answer, row)
        if dtype in SHORT_FLOATS and reference is not None:
            reference = float(str(np.dtype(dtype).type(reference)))
        if pattern:
            reference = _match(pattern, reference, where)
        extra = {key: row.get(key) for key in others}
        is_chosen = options.prompt is not None
        return make_problem(
            question, reference, extra, where, ignore_media=ignore_media, is_chosen=is_chosen
        )

    def scan(whole: bool) -> Iterator[Problem]:
        columns = features
        if not whole:
            columns = [*prompt, *(answer[:1] if pattern else ())]
        try:
            yield from map(problem, count(), _read_columns(dataset, columns))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"hf:{name} has a text that is not UTF-8 ({error}); write its files again"
            ) from None

    if is_listed:
        return listed([*map(problem, count(), dataset)])
    return Source(lambda index: problem(index, dataset[index]), len(dataset), scan)


def _read_columns(dataset: Any, columns: Iterable[str]) -> Iterator[dict[str, Any]]:
    for batch in dataset.select_columns(sorted({*columns})).iter(batch_size=BATCH):
        for row in zip(*batch.values(), strict=True):
            yield dict(zip(batch, row, strict=True))


def _columns(
    name: str, options: DatasetOptions, features: Mapping[str, Any]
) -> tuple[Sequence[str], tuple[str, ...], str]:
    """Returns the columns of the prompt, the path of the answer into a struct (empty: none), and
    its dtype.
    """
    prompt = [options.prompt] if isinstance(options.prompt, str) else options.prompt
    prompt = prompt or [column for column in QUESTION_KEYS if column in features][:1]
    if not prompt:
        raise ValueError(
            f"task.name=hf:{name} has none of the columns {', '.join(QUESTION_KEYS)}; set "
            f"task.options.prompt to one of: {', '.join(features)}"
        )
    answer = options.answer or ("answer" if "answer" in features else "")
    path = (answer,) if answer in features else tuple(filter(None, answer.split(".")))
    kind = None
    for key, column in (*(("prompt", (column,)) for column in prompt), ("answer", path)):
        try:
            kind = reduce(operator.getitem, column, features)
        except (KeyError, TypeError):  # a feature that is no struct
            raise ValueError(
                f"task.options.{key}={'.'.join(column)} is not a column of hf:{name}; "
                f"choose from: {', '.join(features)}"
            ) from None
    if options.answer_pattern and not path:
        raise ValueError(
            f"task.options.answer_pattern={options.answer_pattern!r} needs task.options.answer; "
            "set it"
        )
    return prompt, path, getattr(kind, "dtype", "")


def _match(pattern: str, answer: Any, where: str) -> str:
    matches = [*re.finditer(pattern, "" if answer is None else str(answer))]
    if not matches:
        raise ValueError(
            f"{where}: task.options.answer_pattern={pattern!r} does not match the answer "
            f"{str(answer)[-60:]!r}; change the pattern"
        )
    return matches[-1][1].strip()


def _read(name: str, options: DatasetOptions, split: str) -> tuple[Any, Sequence[str]]:
    """Returns the rows of a split, and the place of each if they are of JSON files."""
    folder = resolve(name, options)
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    path = str(folder)
    data_files = options.data_files
    if folder.is_file():
        if folder.suffix not in FORMATS:
            raise ValueError(
                f"task.name=hf:{name} is not a file of a known format; choose from "
                f"{', '.join(FORMATS)}"
            )
        data_files = path
        path = FORMATS[folder.suffix]
    load = partial(datasets.load_dataset_builder, path, options.config, data_files=data_files)
    try:
        builder = load()
        files: Any = builder.config.data_files
        if type(builder).__module__.endswith(".json"):
            return _read_json(files, datasets.ReadInstruction.from_spec(split))
        if type(builder).__module__.endswith(".csv"):
            for file in chain.from_iterable(files.values()):
                deque(utf8_lines(_open(file), file), maxlen=0)  # raises with the line
            prompt = options.prompt or QUESTION_KEYS
            texts = [prompt] if isinstance(prompt, str) else prompt
            builder = load(
                converters=dict.fromkeys([*texts, options.answer or "answer"], str),
                keep_default_na=False,
                na_values=list(MISSING),
            )
        builder.download_and_prepare()
        return builder.as_dataset(split=split), ()
    except BadRow:
        raise
    except Exception as error:  # every file format has its own exceptions
        raise ValueError(_explain_reading(error, name, options, split)) from error


def _read_json(files: Mapping[str, Sequence[str]], split: Any) -> tuple[list[Any], list[str]]:
    """Returns the rows of a split, and their places."""
    rows = {}
    for part, names in zip(map(str, files), files.values(), strict=True):
        rows[part] = []
        if re.search(rf"\b{re.escape(part)}\b", str(split)):
            for name in names:
                rows[part] += read_rows(_open(name), name)
    chosen = []
    for part in split.to_absolute({part: len(values) for part, values in rows.items()}):
        chosen += rows[part.splitname][part.from_ : part.to]
    if not chosen:
        raise ValueError(EMPTY[0])
    for where, row in chosen:
        if not isinstance(row, Mapping):
            raise BadRow(f"{where} is a {type(row).__name__}, not an object")
    return [row for _, row in chosen], [where for where, _ in chosen]


def _open(file: str) -> Iterator[bytes]:
    import fsspec

    with fsspec.open(file, "rb", compression="infer") as lines:
        yield from lines


def _explain_reading(error: Exception, name: str, options: DatasetOptions, split: str) -> str:
    cause = " ".join(str(error.__cause__ or error).split())[:300] or type(error).__name__
    listed = re.search(r"\[(.*?)\]", cause)
    known = listed[1].replace("'", "") if listed else "none"
    if "BuilderConfig" in cause or "Config name is missing" in cause:
        return (
            f"task.options.config={options.config} does not name a subset of hf:{name}; "
            f"choose from: {known}"
        )
    key = "split" if split == options.split else "eval_split"
    if any(text in cause for text in EMPTY):
        return (
            f"task.name=hf:{name} has no rows in split {split}; correct its files, or "
            f"task.options.{key}"
        )
    if "Unknown split" in cause:
        return f"task.options.{key}={split} is not a split of hf:{name}; choose from: {known}"
    return f"task.name=hf:{name} cannot be read ({cause}); correct its files, or task.options"


def resolve(name: str, options: DatasetOptions) -> Path:
    """Returns the local file or folder, or downloads a hub id; returns its folder, named by the
    commit.
    """
    require(f"task.name=hf:{name}", "datasets")
    local = Path(name).expanduser()
    if name and local.exists():
        if options.revision is not None:
            raise ValueError(
                f"task.options.revision={options.revision} is for hub ids, not hf:{name}; remove it"
            )
        return local
    if (
        name.startswith((".", "/", "~"))
        or local.suffix in FORMATS
        or name.count("/") > 1
        or not name
    ):
        raise FileNotFoundError(
            f"task.name=hf:{name} does not exist; name a file, a folder or a hub id"
        )
    repository = Repository(
        "dataset", name, options.revision, f"task.name=hf:{name}", "task.options.revision"
    )
    return repository.download(options.data_files and [options.data_files], progress=True)


def hub_id(name: str) -> str | None:
    """Returns the hub id of a task's name, or None if it is not a dataset on the hub."""
    kind, _, rest = name.partition(":")
    return rest if kind == "hf" and not (rest and Path(rest).expanduser().exists()) else None
