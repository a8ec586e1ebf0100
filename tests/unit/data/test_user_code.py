"""A time limit on Python code in this process."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megarl.data.user_code import Alarm, alarm


def stubborn() -> None:
    """Swallows every Exception, as much code does."""
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


def catastrophe() -> None:
    re.match(r"(a+)+$", "a" * 40 + "b")


@pytest.mark.parametrize("function", [stubborn, catastrophe])
def test_the_alarm_is_as_before(function):
    def mine(number, frame):
        pass

    before = signal.signal(signal.SIGALRM, mine)
    start = time.monotonic()
    try:
        with pytest.raises(Alarm), alarm(0.1):
            function()
        assert signal.getsignal(signal.SIGALRM) is mine
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < 60


def test_nothing_is_limited_on_another_thread():
    def waits() -> int:
        with alarm(0.05):
            time.sleep(0.2)
        return 7

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(waits).result() == 7
