"""A proxy that sends attribute calls, typed by the services that it is cast to (services.py).

No torch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any


class Proxy:
    """Turns `proxy.name(*values)` into `call("name", *values)`; cast it to a service."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, method)
