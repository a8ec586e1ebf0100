"""Parses JSON from files and servers that may be malformed or hostile."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 100
TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"


def parse_json(text: str | bytes, *, unique_keys: bool = False) -> Any:
    """Returns the value. Raises ValueError if the text is not JSON, or is nested too deeply.

    unique_keys: refuse an object that has a key twice; by default the last one counts
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
    if level:
        raise ValueError(TOO_DEEP)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"it has {key!r} twice")
        values[key] = value
    return values
