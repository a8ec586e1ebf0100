"""Calls trusted functions in long-lived processes, so that a call can be killed at its time limit.

    caller --function, arguments: a pickle--> worker: a child of the fork server, with all rights
           <--- it has begun; the result ----

A worker imports a function's module once and keeps the module's state until a call times out or
ends the process; the next call starts a new worker. A worker has the caller's search path, and the
environment and working folder that the caller had when the first worker started, but no other state
of the caller's process.
"""

import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megarl.jail.fork_server import Child, ForkServer

START_S = 600.0  # time for a worker to import a function
SERVER = ForkServer([__name__], [str(Path(__file__).parents[2])], is_clean=False)


class CallError(Exception):
    """Raised if a call fails; `cause` is the reason in one word."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


class TimeLimitExceeded(CallError):
    """Raised if a call was stopped because it took longer than its limit."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__("timeout", f"took longer than {timeout_s} s")


class Worker:
    """A process that makes one call at a time; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: tuple[Child, Connection] | None = None

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
        """Returns ``function(*arguments)``; both are pickled, so `function` must be importable.

        Raises TimeLimitExceeded, and CallError if the function raises or its process ends.
        """
        task = pickle.dumps((function, arguments))
        with self._lock:
            if self._process is None or self._process[1].poll():  # ended since the last call
                connection, worker_end = Pipe()
                descriptors = [worker_end.fileno()]
                with worker_end:
                    child = SERVER.start(f"{__name__}:serve", sys.path, descriptors)
                self._process = child, connection
            child, connection = self._process
            self._process = None
            try:
                connection.send_bytes(task)
                # an empty message after the function is imported, then the reply
                reply = _receive(connection, START_S) or _receive(connection, timeout_s)
            except (EOFError, ConnectionError):
                raise CallError("error", f"its process ended with status {child.kill()}") from None
            except BaseException:
                child.kill()
                raise
            self._process = child, connection
        # safe to unpickle: the reply is from our own process, which runs the user's function
        status, value = pickle.loads(reply)
        if status == "error":
            raise CallError("error", f"raised {value}")
        return value


@cache
def worker_of(name: str) -> Worker:
    """Returns the worker named `name`, always the same one: functions that it calls share state."""
    return Worker()


def _receive(connection: Connection, timeout_s: float) -> bytes:
    if not connection.poll(timeout_s):
        raise TimeLimitExceeded(timeout_s)
    return connection.recv_bytes()


# --- the worker -----------------------------------------------------------------------------------


def serve(path: Sequence[str], descriptor: int) -> None:
    """Calls functions until the caller closes the connection; runs in the worker."""
    sys.path[:] = path
    connection = Connection(descriptor)
    with suppress(EOFError):
        while True:
            task = connection.recv_bytes()
            try:
                function, arguments = pickle.loads(task)
                connection.send_bytes(b"")
                reply = pickle.dumps(("value", function(*arguments)))
            except (Exception, SystemExit) as error:  # noqa: BLE001 (functions may raise anything)
                reply = pickle.dumps(("error", f"{type(error).__name__}: {error}"))
            connection.send_bytes(reply)
