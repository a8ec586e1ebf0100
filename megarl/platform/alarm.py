"""A time limit on Python code in the main thread, which alone gets signals."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Alarm(BaseException):
    """A BaseException, so that `except Exception` in the called code does not catch it."""


@contextmanager
def alarm(timeout_s: float) -> Iterator[None]:
    """Raise Alarm after `timeout_s` seconds, and every second after that in case the code catches
    it. In another thread, such as a server's, nothing is limited.
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
