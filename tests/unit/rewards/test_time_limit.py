"""Time limits on functions, on the main thread and off it, where no signal arrives."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial

import pytest

from megarl.config.schema import Task
from megarl.data.tasks import load_task
from megarl.rewards.interface import ScoreError, ScoreRequest
from megarl.rewards.rules import Accuracy
from megarl.rewards.time_limit import TimeLimitExceeded, call_with_time_limit


def elsewhere(function, arguments, timeout_s=10.0):
    """`call_with_time_limit` on a thread that is not the main one."""
    with ThreadPoolExecutor(1) as pool:
        call = partial(function, **arguments)
        return pool.submit(call_with_time_limit, call, timeout_s=timeout_s).result()


def here(function, arguments, timeout_s=10.0):
    return call_with_time_limit(partial(function, **arguments), timeout_s=timeout_s)


CATASTROPHE = {
    "pattern": r"(a+)+$",
    "string": "a" * 40 + "b",
}  # in C, and without letting go of the GIL


@pytest.mark.parametrize("where", [here, elsewhere])
def test_a_pattern_that_takes_for_ever_is_stopped(where):
    start = time.monotonic()
    with pytest.raises(TimeLimitExceeded):
        where(re.match, CATASTROPHE, timeout_s=0.3)
    assert time.monotonic() - start < 60


def test_other_threads_go_on_meanwhile():
    done = []
    with ThreadPoolExecutor(1) as pool:
        match = partial(re.match, **CATASTROPHE)
        slow = pool.submit(call_with_time_limit, match, timeout_s=0.5)
        while not slow.done():
            done.append(time.monotonic())
            time.sleep(0.01)
        assert isinstance(slow.exception(), TimeLimitExceeded)
    assert done[-1] - done[0] < 20  # by the worker's own alarm, not by our patience with it
    assert len(done) > 5


@pytest.mark.parametrize("where", [here, elsewhere])
def test_mathematics_that_would_fill_the_world(where):
    with pytest.raises(TimeLimitExceeded):
        where(pow, {"base": 9**9**5, "exp": 9**9}, timeout_s=0.3)


def test_accuracy_off_the_main_thread():
    """math-verify sets an alarm of its own, which raises there."""
    request = ScoreRequest("", "", "", "0.5", final_answer=r"\frac{1}{2}")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(Accuracy(30.0), [request]).result()[0].value == 1.0


@pytest.mark.long
def test_a_tasks_own_judge_in_a_users_function_off_the_main_thread():
    problem = load_task(Task(name="reasoning_gym:chain_sum")).problem(0)
    assert elsewhere(ask, {"score": problem.extra["score"], "text": problem.answer}, 60.0) == 1.0


def ask(score, text):
    return score(text)


def test_a_worker_is_used_again_and_tells_what_was_raised():
    assert elsewhere(print, {"end": "this is no reply\n"}) is None
    pids = {elsewhere(os.getpid, {}) for _ in range(5)}
    assert len(pids) == 1 and os.getpid() not in pids
    with pytest.raises(ScoreError, match=re.escape("ZeroDivisionError: Fraction(1, 0)")):
        elsewhere(Fraction, {"numerator": 1, "denominator": 0})
    with pytest.raises(ScoreError, match="SystemExit"):
        elsewhere(sys.exit, {})
    with pytest.raises(ScoreError, match="with status -6"):
        elsewhere(os.abort, {})
    assert elsewhere(os.getpid, {}) not in pids


def test_what_cannot_be_pickled_is_left_behind():
    release = threading.Event()
    with pytest.raises(TimeLimitExceeded):
        elsewhere(lambda: release.wait(5), {}, timeout_s=0.1)
    release.set()
    assert elsewhere(lambda: 7, {}) == 7
    with pytest.raises(ZeroDivisionError):
        elsewhere(lambda: 1 // 0, {})


def test_a_functions_own_timeout_is_not_the_limit():
    def times_out():
        raise TimeoutError("of a socket")

    for where in (here, elsewhere):
        with pytest.raises(TimeoutError, match="of a socket"):
            where(times_out, {})


def test_the_alarm_is_as_before():
    def mine(number, frame):
        pass

    before = signal.signal(signal.SIGALRM, mine)
    try:
        with pytest.raises(TimeLimitExceeded):
            here(stubborn, {}, timeout_s=0.1)
        assert signal.getsignal(signal.SIGALRM) is mine
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)


def stubborn():
    """Swallows every Exception, as much code does."""
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)
