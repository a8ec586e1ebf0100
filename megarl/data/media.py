"""Images, audio and video: rows and models that have them are refused, as only text is trained on.

`task.ignore_media` takes the text of such rows, without the placeholders of what is missing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.models.config_json import read_config

MEDIA = re.compile(r"(input_)?(image|audio|video)s?(_url)?")  # a column, or the type of a part
FEATURE = re.compile(r"\b(Image|Audio|Video)\(")  # of datasets
PLACEHOLDER = re.compile(r"<(image|audio|video)>\n?")
MODEL_KEYS = ("vision_config", "audio_config", "video_config")
MODEL_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
REMEDY = "megarl trains on text; choose text only, or set task.ignore_media=true to leave them out"


def refuse_media(where: object, names: Sequence[str]) -> None:
    if names:
        raise ValueError(f"{where} has images, audio or video ({', '.join(names)}); {REMEDY}")


def media_of(row: Mapping[str, Any]) -> list[str]:
    """Returns the names of the columns and content parts of a row that are not text."""
    columns = [name for name, value in row.items() if value and MEDIA.fullmatch(name)]
    return columns + [part for value in row.values() for part in _parts(value)]


def _parts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and isinstance(value.get("content"), list):
        for part in value["content"]:
            if is_media(part):
                yield f"content of type {part.get('type')}"
    elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping | list):
        for item in value:
            yield from _parts(item)


def is_media(part: Any) -> bool:
    return isinstance(part, Mapping) and bool(MEDIA.fullmatch(str(part.get("type"))))


def without_placeholders(value: Any) -> Any:
    """Returns a text, or messages, without `<image>` and the like."""
    if isinstance(value, str):
        return PLACEHOLDER.sub("", value)
    if isinstance(value, Mapping):
        return {key: without_placeholders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_placeholders(item) for item in value]
    return value


def check_model_media(folder: Path, *, ignore: bool) -> None:
    """Raises ValueError for the folder of a model that reads more than text."""
    raw = read_config(folder / "config.json").raw
    names = [f"config.json: {key}" for key in MODEL_KEYS if raw.get(key)]
    names += [name for name in MODEL_FILES if (folder / name).is_file()]
    refuse_media(f"the model {folder}", () if ignore else names)
