"""Encodes arguments and results of the solution as JSON, with tags for types that JSON lacks.

    1, "a", None, [1, 2]    {"tuple": [...]}, {"dict": [[key, value], ...]}, {"int": hex}, ...
    {"object": [number, class]}  an object that stays in the process of the solution

The trainer never decodes a value, so it never builds a set or dict with untrusted keys.
"""

from collections import deque
from collections.abc import Callable, ItemsView, Iterable, KeysView, ValuesView
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any

MAX_DEPTH = 200  # levels of nested containers; a dict counts as two
MAX_ITEMS = 100_000  # items of an iterator that are sent; it may be endless
# attributes of plain data
PLAIN = {name for kind in (str, int, float, list, dict, set, bytes) for name in dir(kind)}

JailMessage = dict[str, Any]  # a JSON object that jail and trainer exchange
Refer = Callable[[Any], int]
Builders = dict[str, Callable[[Any], Any]]  # tag -> function that builds a value from the content


class NotPlain(Exception):
    """Raised if a value is not plain data. Not an exception that tests could expect."""


class NamedItems(tuple):
    """A named tuple of the solution."""

    names: list[str]

    def __getattr__(self, name: str) -> Any:
        if name not in self.names or name.startswith("_"):
            raise AttributeError(name)
        value = self[self.names.index(name)]
        if name in PLAIN and callable(value):  # a proxy that would answer startswith("abc")
            raise AttributeError(name)
        return value


def _named_items(pairs: list[Any]) -> NamedItems:
    items = NamedItems(value for _, value in pairs)
    items.names = [name for name, _ in pairs]
    return items


OF_TEXT: Builders = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "decimal": Decimal,
}
OF_PAIRS: Builders = {"dict": dict, "named": _named_items}
OF_ITEMS: Builders = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "iterator": iter,
    "keys": lambda items: dict.fromkeys(items).keys(),
    "complex": lambda items: complex(*items),
    "fraction": lambda items: Fraction(*items),
    "range": lambda items: range(*items),
    "slice": lambda items: slice(*items),
}


def refuse(value: Any) -> int:
    raise NotPlain(f"{type(value).__name__} is not plain data")


def failure(error: str, text: str = "") -> JailMessage:
    """Returns the reply to an operation that raised an exception of the builtin class `error`."""
    return {"raised": [error, "Exception"], "text": text, "kind": "exception"}


def encode(value: Any, refer: Refer = refuse) -> Any:
    """Returns `value` in the encoded form; an instance of a subclass is encoded as its base.

    ``refer(value)`` returns a number for a value that is not plain data, or raises an error.
    """
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        if -(2**63) <= value < 2**63:
            return int.__index__(value)
        return {"int": int.__format__(value, "x")}
    if isinstance(value, list):
        return _encode_all(list.__iter__(value), refer)
    kind: Any
    names = getattr(value, "_fields", None)
    if names and issubclass(type(value), tuple):
        pairs = zip(names, tuple.__iter__(value), strict=True)
        return {"named": [_encode_all(pair, refer) for pair in pairs]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: _encode_all(kind.__iter__(value), refer)}
    if isinstance(value, dict):
        return {"dict": [_encode_all(pair, refer) for pair in dict.items(value)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, Decimal):
        return {"decimal": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, Fraction):
        return {"fraction": _encode_all(value.as_integer_ratio(), refer)}
    if isinstance(value, range | slice):
        items = (value.start, value.stop, value.step)
        return {type(value).__name__: _encode_all(items, refer)}
    if isinstance(value, KeysView):  # has its own tag, because a keys view equals a set
        return {"keys": _encode_all(value, refer)}
    if isinstance(value, deque | ValuesView | ItemsView):
        return _encode_all(value, refer)
    if type(value).__module__ in ("builtins", "itertools") and hasattr(value, "__next__"):
        return {"iterator": _encode_all(islice(value, MAX_ITEMS), refer)}
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers
        return encode(value.tolist(), refer)
    return {"object": [refer(value), type(value).__name__]}


def _encode_all(values: Iterable[Any], refer: Refer) -> list[Any]:
    return [encode(value, refer) for value in values]


def decode(value: Any, resolve: Callable[[int, str], Any]) -> Any:
    """Returns the value that `encode` has encoded. Only jails call this.

    ``resolve(number, class)`` returns an object. An untrusted value may raise any error.
    """
    if isinstance(value, list):
        return [decode(item, resolve) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "object":
        return resolve(*content)
    if kind in OF_TEXT:
        return OF_TEXT[kind](content)
    return (OF_PAIRS | OF_ITEMS)[kind](decode(content, resolve))


def is_value(value: Any) -> bool:
    """Returns True if untrusted JSON has the form of an encoded value.

    Takes linear time at any depth.
    """
    todo = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        if isinstance(item, dict):
            if len(item) != 1:
                return False
            ((kind, content),) = item.items()
            if not _is_content(kind, content):
                return False
            item = content
        if isinstance(item, list):
            todo += [(child, depth + 1) for child in item]
        if depth > MAX_DEPTH:
            return False
    return True


def _is_content(kind: str, content: Any) -> bool:
    if kind == "object":
        return isinstance(content, list) and [*map(type, content)] == [int, str]
    if kind in OF_TEXT:
        return isinstance(content, str)
    is_list = isinstance(content, list)
    if kind in OF_PAIRS:
        return is_list and all(isinstance(pair, list) and len(pair) == 2 for pair in content)
    return is_list and kind in OF_ITEMS
