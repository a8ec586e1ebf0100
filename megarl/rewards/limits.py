"""A time limit on somebody's function, on whatever thread it is called.

main thread      SIGALRM raises inside the call; the `re` engine and big-integer arithmetic look for signals too
another thread   a worker process makes the call; its own alarm ends it, even inside C code that holds the GIL

A thread cannot be stopped from outside, and one that matches a regular expression lets no other thread run: that is
why a process. What cannot be pickled (a lambda) is called on a daemon thread, which is left behind when it is late.
A call in the main thread that is stuck in C code which never looks for signals is not stopped.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megarl.platform.env import child_env

__all__ = ["TooSlow", "WorkerFailed", "limited", "serve"]

HEAD = struct.Struct("<Qd")  # bytes of the task, its time limit
SIZE = struct.Struct("<Q")  # bytes of the reply
START_S = 30.0  # a worker may take this long beyond the limit: it imports the function first


class TooSlow(Exception):
    """The call took longer than its limit and was stopped."""


class WorkerFailed(Exception):
    """What the call raised in a worker, as text."""


class _Rung(BaseException):
    """Not an Exception, so that code which swallows those cannot swallow it."""


def limited(function: Callable[..., Any], arguments: Mapping[str, Any], *, timeout_s: float) -> Any:
    """``function(**arguments)``; raises TooSlow, or what it raises (as WorkerFailed off the main thread)."""
    if threading.current_thread() is threading.main_thread():
        try:
            with _alarm(timeout_s):
                return function(**arguments)
        except _Rung:
            raise TooSlow from None
    try:
        task = pickle.dumps((function, dict(arguments)))
    except Exception:  # noqa: BLE001 (pickling runs code of whatever stands in the arguments)
        return _left_behind(function, arguments, timeout_s)
    return _in_worker(task, timeout_s)


@contextmanager
def _alarm(timeout_s: float) -> Iterator[None]:
    """Raise _Rung here after `timeout_s` seconds, and each second after that, should the code catch it."""

    def ring(number: int, frame: object) -> None:
        raise _Rung

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout_s, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _left_behind(function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float) -> Any:
    done: list[tuple[Any, BaseException | None]] = []

    def call() -> None:
        try:
            done.append((function(**arguments), None))
        except BaseException as error:  # noqa: BLE001 (raised again by whoever waits)
            done.append((None, error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not done:
        raise TooSlow
    value, error = done[0]
    if error is not None:
        raise error
    return value


# --- worker processes ---------------------------------------------------------------------------------------------

_idle: deque[subprocess.Popen[bytes]] = deque()


def _in_worker(task: bytes, timeout_s: float) -> Any:
    worker = _idle.pop() if _idle else _start()
    try:
        kind, value = _ask(worker, task, timeout_s)
    except BaseException:
        worker.kill()
        worker.wait()
        raise
    _idle.append(worker)
    if kind == "error":
        raise WorkerFailed(value)
    return value


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "from megarl.rewards.limits import serve; serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_env(PYTHONPATH=os.pathsep.join(path for path in sys.path if path)),
    )


def _ask(worker: subprocess.Popen[bytes], task: bytes, timeout_s: float) -> tuple[str, Any]:
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.write(HEAD.pack(len(task), timeout_s) + task)
        worker.stdin.flush()
    except BrokenPipeError:
        raise WorkerFailed("the worker process ended by itself") from None
    deadline = time.monotonic() + timeout_s + START_S
    head = _read(worker, SIZE.size, deadline)
    return pickle.loads(_read(worker, SIZE.unpack(head)[0], deadline))  # our own process, running the user's function


def _read(worker: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
    assert worker.stdout is not None
    poll, data = select.poll(), b""  # select() cannot, where a process has more than 1024 files open
    poll.register(worker.stdout, select.POLLIN)
    while len(data) < size:
        if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise TooSlow
        more = os.read(worker.stdout.fileno(), size - len(data))
        if not more:
            status = worker.wait()
            raise TooSlow if status == -signal.SIGALRM else WorkerFailed(f"the worker process ended with {status}")
        data += more
    return data


def serve() -> None:
    """The worker: calls what it reads from stdin, until that closes. Too slow a call ends the process."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the function prints is no reply
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; then stdin closes
    while head := sys.stdin.buffer.read(HEAD.size):
        size, timeout_s = HEAD.unpack(head)
        task = sys.stdin.buffer.read(size)
        try:
            function, arguments = pickle.loads(task)  # imports the function: not its own time, but within START_S
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            reply = pickle.dumps(("value", function(**arguments)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code may fail in any way)
            reply = pickle.dumps(("error", f"{type(error).__name__}: {error}"))
        signal.setitimer(signal.ITIMER_REAL, 0)
        out.write(SIZE.pack(len(reply)) + reply)
        out.flush()
