"""`Patch`, a replaced name of another library, and the context that applies patches.

Each module of this folder exports PATCHES, all changes to one library, and a function that applies
them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True)
class Patch:
    """A name of another library that megarl replaces."""

    where: str  # dotted name; in megatron.py also a `.method()` of any object, or a module to hide
    replacement: Any
    why: str  # how the library uses the name, and why megarl replaces it
    versions: str  # versions of the library that need the patch
    delete_when: str
    test: str  # test in tests/ that fails when the library no longer needs the patch
    calls_original: bool = False  # True: the replacement takes the original as its first argument


@contextmanager
def replaced(patches: Iterable[Patch]) -> Iterator[None]:
    """Imports the libraries and applies the patches within the context."""
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
