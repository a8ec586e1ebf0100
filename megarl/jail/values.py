"""Plain values as JSON, with tags for what JSON lacks: how tests and solution exchange arguments and results.

    1, "a", None, [1, 2]    {"tuple": [...]}, {"dict": [[key, value], ...]}, {"int": hex}, {"bytes": hex}, ...
    {"object": number}      an object that stays in the process of the solution

The trainer never decodes one, so that it builds no set or dict of untrusted keys. Standard library only, for jails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

MAX_DEPTH = 100  # of nested containers
MAX_ITEMS = 10_000  # of an iterator, which may be endless
SEQUENCES = ("tuple", "set", "frozenset", "complex", "fraction", "range", "iterator")
TEXTS = ("int", "bytes", "decimal")
LISTED = (deque, type({}.keys()), type({}.values()), type({}.items()))


class NotPlain(Exception):
    """The value is not plain data; no exception that tests expect."""


def refuse(value: Any) -> int:
    raise NotPlain(f"{type(value).__name__} is not plain data")


def encode(value: Any, refer: Callable[[Any], int] = refuse) -> Any:
    """Encodes `value`, a subclass as its base; `refer` numbers what is not plain data, or raises NotPlain."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return (
            int.__index__(value)
            if -(2**63) <= value < 2**63
            else {"int": int.__format__(value, "x")}
        )
    if isinstance(value, list):
        return [encode(item, refer) for item in list.__iter__(value)]
    kind: Any
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, refer) for item in kind.__iter__(value)]}
    if isinstance(value, dict):
        return {
            "dict": [[encode(key, refer), encode(item, refer)] for key, item in dict.items(value)]
        }
    return _encode_rare(value, refer)


def _encode_rare(value: Any, refer: Callable[[Any], int]) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {
            "range": [encode(number, refer) for number in (value.start, value.stop, value.step)]
        }
    if isinstance(value, LISTED):
        return [encode(item, refer) for item in value]
    if refer is refuse and hasattr(type(value), "__next__"):
        return {"iterator": [encode(item, refer) for item in islice(value, MAX_ITEMS)]}
    name = f"{type(value).__module__}.{type(value).__name__}"  # of classes that are imported only if the code does
    if name == "fractions.Fraction":
        return {"fraction": [encode(value.numerator, refer), encode(value.denominator, refer)]}
    if name == "decimal.Decimal":
        return {"decimal": str(value)}
    if hasattr(value, "tolist"):  # NumPy
        return encode(value.tolist(), refer)
    return {"object": refer(value)}


def decode(value: Any, resolve: Callable[[int], Any]) -> Any:
    """Inverse of `encode`, for jails only; `resolve` returns the object of a number. May raise anything."""
    if isinstance(value, list):
        return [decode(item, resolve) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "object":
        return resolve(content)
    if kind == "dict":
        return {decode(key, resolve): decode(item, resolve) for key, item in content}
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "decimal":
        from decimal import Decimal

        return Decimal(content)
    items = [decode(item, resolve) for item in content]
    if kind == "fraction":
        from fractions import Fraction

        return Fraction(*items)
    if kind in ("complex", "range"):
        return complex(*items) if kind == "complex" else range(*items)
    return {"tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter}[kind](items)


def is_encoded(value: Any, *, with_objects: bool = False) -> bool:
    """Whether untrusted JSON has the form of an encoded value; in linear time, however deep it is."""
    todo = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        if isinstance(item, dict):
            if len(item) != 1:
                return False
            ((kind, content),) = item.items()
            if not _is_content(kind, content, with_objects):
                return False
            item = content
        if isinstance(item, list):
            todo += [(child, depth + 1) for child in item]
        if depth > MAX_DEPTH:
            return False
    return True


def _is_content(kind: str, content: Any, with_objects: bool) -> bool:
    if kind == "object":
        return with_objects and type(content) is int
    if kind == "dict":
        return isinstance(content, list) and all(
            isinstance(pair, list) and len(pair) == 2 for pair in content
        )
    return isinstance(content, str if kind in TEXTS else list) and kind in (*TEXTS, *SEQUENCES)
