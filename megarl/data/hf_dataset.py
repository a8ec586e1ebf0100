"""Reads rows of `hf:` tasks with `datasets`: datasets on the Hugging Face hub, local folders and
files. Does not import torch.

    hub id --snapshot--> folder named by its commit -+-> JSON, CSV: rows.listed -+
    local folder or file ----------------------------+-> Arrow, memory-mapped ---+-> Source

A hub id is downloaded first: offline, `datasets` itself would read the revision that it prepared
last. JSON and CSV are read without Arrow, which would convert some texts to dates or numbers.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np

from megarl.data.media import FEATURE, refuse_media
from megarl.data.rows import (
    BadRow,
    DatasetOptions,
    PlacedRow,
    Problem,
    Source,
    listed,
    read_problem,
    read_rows,
    read_table,
)
from megarl.models.hub import HUB_ID
from megarl.platform.env import require
from megarl.platform.hub import Repository

# formats of single files
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
# parts of the errors by which `datasets` reports a split without rows
EMPTY = ("corresponds to no data", "BatchSize must be greater than 0", "StopIteration")
BATCH = 1000  # rows per read of a scan


def load_rows(name: str, options: DatasetOptions, split: str, *, ignore_media: bool) -> Source:
    """Loads one split. Raises ValueError or FileNotFoundError with the value and the remedy."""
    dataset = _read(name, options, split)
    if isinstance(dataset, list):
        return listed(dataset, options, f"hf:{name}", ignore_media=ignore_media)
    media = [key for key, kind in dataset.features.items() if FEATURE.search(repr(kind))]
    refuse_media(f"task.name=hf:{name}", media, ignore=ignore_media)
    dataset = dataset.remove_columns(media)
    features = dataset.features
    options.check([features], f"hf:{name}")
    column = options.answer or "answer"
    labels = getattr(features.get(column), "names", None)  # ClassLabel, for example MMLU's A to D
    short = {
        key: getattr(np, kind)
        for key, feature in features.items()
        for kind in re.findall("float16|float32", repr(feature))
    }

    def problem(index: int, row: dict[str, Any]) -> Problem:
        where = f"hf:{name} split {split} row {index}"
        for key in row.keys() & short:
            row[key] = _as_written(row[key], short[key])
        if labels and row.get(column) is not None:
            row[column] = labels[row[column]]
        return read_problem(row, where, options, ignore_media=ignore_media)

    def scan() -> Iterator[Problem]:
        tables = dataset.with_format("arrow").iter(batch_size=BATCH)
        rows = chain.from_iterable(table.to_pylist() for table in tables)
        try:
            yield from map(problem, count(), rows)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"hf:{name} has a text that is not UTF-8 ({error}); write its files again"
            ) from None

    return Source(lambda index: problem(index, dataset[index]), len(dataset), scan)


def _as_written(value: Any, kind: Callable[[float], np.floating[Any]]) -> Any:
    """Returns a value whose float16 or float32 numbers, which `datasets` reads as float64, have
    their short decimal form.
    """
    if isinstance(value, list):
        return [_as_written(item, kind) for item in value]
    if isinstance(value, dict):
        return {key: _as_written(item, kind) for key, item in value.items()}
    if isinstance(value, float) and kind(value) == value:  # False for a float64 of the same struct
        return float(str(kind(value)))
    return value


def _read(name: str, options: DatasetOptions, split: str) -> Any:
    """Returns a split: a datasets.Dataset, or for JSON and CSV a list of (place, row)."""
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
    try:
        builder = datasets.load_dataset_builder(path, options.config, data_files=data_files)
        files: Any = builder.config.data_files
        separator = getattr(builder.config, "sep", ",")
        read_cells = partial(read_table, columns=options, separator=separator)
        read = {"json": read_rows, "csv": read_cells}.get(builder.name)
        if read:
            return _read_files(read, files, datasets.ReadInstruction.from_spec(split))
        builder.download_and_prepare()
        return builder.as_dataset(split=split)
    except BadRow:
        raise
    except Exception as error:  # every file format has its own exceptions
        cause = " ".join(str(error.__cause__ or error).split())[:300] or type(error).__name__
        problem = f"cannot be read ({cause})"
        if any(text in cause for text in EMPTY):
            problem = "has no rows"
        key = "split" if split == options.split else "eval_split"
        raise ValueError(
            f"task.name=hf:{name} {problem}; correct its files, or "
            f"task.options.{key}={split} and config={options.config}"
        ) from error


def _read_files(
    read: Callable[..., Iterable[PlacedRow]], files: Mapping[str, Sequence[str]], split: Any
) -> list[PlacedRow]:
    import fsspec

    rows = {}
    for key, names in files.items():
        part = str(key)
        rows[part] = []
        if re.search(rf"\b{re.escape(part)}\b", str(split)):
            for name in names:
                with fsspec.open(name, "rb", compression="infer") as lines:
                    rows[part] += read(lines, name)
    chosen = []
    for part in split.to_absolute({part: len(values) for part, values in rows.items()}):
        chosen += rows[part.splitname][part.from_ : part.to]
    if not chosen:
        raise ValueError(EMPTY[0])
    return chosen


def resolve(name: str, options: DatasetOptions) -> Path:
    """Returns the path of a local file or folder, or downloads a hub id and returns its folder,
    which is named by the commit. Raises FileNotFoundError or ValueError.
    """
    require(f"task.name=hf:{name}", "datasets")
    local = Path(name).expanduser()
    if name and local.exists():
        if options.revision is not None:
            raise ValueError(
                f"task.options.revision={options.revision} is for hub ids, not hf:{name}; remove it"
            )
        return local
    if local.suffix in FORMATS or not HUB_ID.fullmatch(name):
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
