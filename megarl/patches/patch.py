"""The row type of the tables in this folder, and how a row replaces a name of a loaded library.

Each file exports PATCHES, all changes of one library, and the function that applies them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True)
class Patch:
    """A name of another library that megarl replaces."""

    where: str  # dotted name; in megatron.py also a `.method()` of any object
    replacement: Any
    why: str  # what the library does with the name, and why megarl differs
    versions: str  # of the library
    delete_when: str
    test: str  # in tests/; fails once the library no longer needs the patch
    calls_original: bool = False  # the replacement takes the original before the arguments


@contextmanager
def replaced(patches: Iterable[Patch]) -> Iterator[None]:
    """Imports the libraries, and replaces their names within the context."""
    with ExitStack() as stack:
        for patch in patches:
            owner_name, _, name = patch.where.rpartition(".")
            owner = resolve_name(owner_name)
            original = vars(owner)[name]
            value = patch.replacement
            if patch.calls_original:
                value = _calling(value, getattr(owner, name))
            if isinstance(original, staticmethod | classmethod):
                value = staticmethod(value)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, value)
        yield


def _calling(replacement: Callable[..., Any], original: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: replacement(original, *args, **kwargs)
