"""A proxy that forwards method calls; callers cast it to a typed service (services.py).

Imports no torch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any


class Proxy:
    """Turns `proxy.name(*values)` into `call("name", *values)`."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, method)
