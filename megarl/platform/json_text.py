"""Parses JSON from files and servers that may be malformed or hostile."""

import json
from itertools import chain
from typing import Any

MAX_DEPTH = 100
TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"


def parse_json(text: str | bytes, *, unique_keys: bool = False) -> Any:
    """Returns the value.

    Raises ValueError if it is not JSON, too deep or, with `unique_keys`, has a key twice.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    level = [value]
    for _ in range(MAX_DEPTH):
        parents = (
            x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)
        )
        level = list(chain.from_iterable(parents))
    if level:
        raise ValueError(TOO_DEEP)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"it has {key!r} twice")
        values[key] = value
    return values
