"""Parses JSON from files and servers that may be malformed or hostile."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

MAX_DEPTH = 100
TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"


def parse_json(text: str | bytes, where: object) -> Any:
    """Returns the value of a JSON text.

    Raises ValueError, prefixed with `where` (a file, or file and line), if the text is not JSON, is
    nested too deep or has a key twice.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode(json.detect_encoding(text))
        value = DECODER.decode(text)
    except RecursionError:
        problem = TOO_DEEP
    except ValueError as error:
        problem = error
    else:
        if not _is_deep(value):
            return value
        problem = TOO_DEEP
    raise ValueError(f"{where} is not JSON ({problem})")


def read_json(file: Path) -> Any:
    """Returns the value in a JSON file. Raises OSError, and ValueError like `parse_json`."""
    return parse_json(file.read_bytes(), file)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        parents = [x.values() if type(x) is dict else x for x in level if type(x) in (dict, list)]
        if not parents:
            return False
        level = list(chain.from_iterable(parents))
    return bool(level)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"it has {twice!r} twice")
    return values


DECODER = json.JSONDecoder(object_pairs_hook=_unique)
