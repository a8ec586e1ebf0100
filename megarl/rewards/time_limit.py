"""Calls a user's function under a time limit, from any thread.

    main thread      SIGALRM raises inside the call; the `re` engine and big-integer arithmetic
                     check for signals too
    another thread   a worker process makes the call; its own alarm ends it, even inside C code that
                     holds the GIL

A thread cannot be stopped, and blocks all others while it matches a regular expression, hence the
process. A function that cannot be pickled runs on a daemon thread, which is abandoned when it is
late. C code that never checks for signals is not stopped on the main thread.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from megarl.platform.alarm import Alarm, alarm
from megarl.platform.env import child_env
from megarl.rewards.interface import ScoreError

START_S = 30.0  # a worker may exceed the limit by this much: it imports the function first


class TimeLimitExceeded(ScoreError):
    """The call took longer than its limit and was stopped."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__("timeout", f"took longer than {timeout_s} s")


def call_with_time_limit(function: Callable[[], Any], *, timeout_s: float) -> Any:
    """Returns ``function()``; use a `partial`, which can be pickled, for arguments.

    Raises TimeLimitExceeded, or the function's error (in a worker, as a ScoreError).
    """
    if threading.current_thread() is threading.main_thread():
        try:
            with alarm(timeout_s):
                return function()
        except Alarm:
            raise TimeLimitExceeded(timeout_s) from None
    try:
        task = pickle.dumps((function, timeout_s))
    except Exception:  # noqa: BLE001 (pickling runs code of the arguments)
        future = on_daemon_thread(function)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # raised by the function itself
                raise
            raise TimeLimitExceeded(timeout_s) from None
    return _call_in_worker(task, timeout_s)


def on_daemon_thread(function: Callable[[], Any]) -> Future[Any]:
    """Runs `function` on a thread that does not keep the process alive, since it may never end."""
    future = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 (raised again by Future.result)
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


Worker = tuple[subprocess.Popen[bytes], Connection]
_idle: list[Worker] = []


def _call_in_worker(task: bytes, timeout_s: float) -> Any:
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _start_worker()
    process, connection = worker
    try:
        try:
            connection.send_bytes(task)
            if not connection.poll(timeout_s + START_S):
                raise TimeLimitExceeded(timeout_s)
            # a pickle from our own process, which runs the user's function
            status, value = connection.recv()
        except (EOFError, OSError):
            returncode = process.wait(START_S)
            if returncode == -signal.SIGALRM:
                raise TimeLimitExceeded(timeout_s) from None
            raise ScoreError(
                "error", f"its worker process exited with status {returncode}"
            ) from None
    except BaseException:
        process.kill()
        process.wait()
        connection.close()
        raise
    _idle.append(worker)
    if status == "error":
        raise ScoreError("error", f"raised {value}")
    return value


def _start_worker() -> Worker:
    connection, worker_end = Pipe()
    with worker_end:
        descriptor = worker_end.fileno()
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from megarl.rewards.time_limit import serve; serve({descriptor})",
            ],
            stdin=subprocess.DEVNULL,
            stdout=2,  # keep the function's prints out of the trainer's output
            pass_fds=(descriptor,),
            env=child_env(PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
        )
    return process, connection


def serve(descriptor: int) -> None:
    """Makes calls until the connection closes.

    SIGALRM's default action ends the process if a call exceeds its limit.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # the parent handles Ctrl-C and then closes the connection
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Connection(descriptor) as connection:
        while True:
            try:
                task = connection.recv_bytes()
            except EOFError:
                return
            try:
                # may import: within START_S, not the limit
                function, timeout_s = pickle.loads(task)
                signal.setitimer(signal.ITIMER_REAL, timeout_s)
                reply = pickle.dumps(("value", function()))
            except (Exception, SystemExit) as error:  # noqa: BLE001 (user code may fail in any way)
                reply = pickle.dumps(("error", f"{type(error).__name__}: {error}"))
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(reply)
