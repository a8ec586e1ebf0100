"""Runs code of users and models in this process: imports functions that the config names, as
`package.module:function` or `package.module.function`, and limits the time of Python code.

Functions with a name can be called in another process (jail/workers.py). Code without a name can
only be called here: a chat template, which needs its tokenizer, and the `score` of a task, which
may be a lambda or a method of its data.
"""

import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any


def is_dotted(name: str) -> bool:
    return ":" in name or "." in name


def import_function(path: str, *, setting: str) -> Callable[..., Any]:
    """Imports and returns the function at `path`; modules may be in the working directory.

    Raises ValueError, naming the config key `setting`, if the path cannot be imported.
    """
    module_name, _, function_name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not function_name:
        raise ValueError(
            f"{setting}={path!r} is not the path of a function; write package.module:function"
        )
    if str(Path.cwd()) not in sys.path:  # console scripts start without it
        sys.path.insert(0, str(Path.cwd()))
    try:
        function: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (user code may fail in any way)
        kind = "" if isinstance(error, ModuleNotFoundError) else f"{type(error).__name__}: "
        place = extract_tb(error.__traceback__)[-1]
        if place.line:  # the error is in user code, not in the import system
            kind = f"{place.filename}, line {place.lineno}: {kind}"
        raise ValueError(
            f"{setting}={path!r} cannot be imported ({kind}{error}); run from the folder that "
            f"contains {module_name.split('.')[0]}, or install it"
        ) from None
    for name in function_name.split("."):
        if not hasattr(function, name):
            raise ValueError(f"{setting}={path!r}: {module_name} has no {name!r}; name a function")
        function = getattr(function, name)
    if not callable(function):
        raise ValueError(
            f"{setting}={path!r} is a {type(function).__name__}, not a function; name a function"
        )
    return function


class Alarm(BaseException):
    """Raised by `alarm`. A BaseException, so that `except Exception` in user code misses it."""


@contextmanager
def alarm(timeout_s: float) -> Iterator[None]:
    """Raises Alarm in the guarded code after `timeout_s` seconds, and again every second in case
    the code catches it. Only works in the main thread; elsewhere, such as in a server's thread, the
    time is not limited.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: object) -> None:
        raise Alarm

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout_s, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
