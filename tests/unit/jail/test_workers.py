"""Functions in long-lived processes: what they keep, and what becomes of one that is late or ends its process."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from megarl.jail import workers
from megarl.jail.workers import CallError, TimeLimitExceeded, Worker, worker_of


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    if worker._process:
        worker._process[0].kill()


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (time.sleep, [60]),
        # in C, and without letting go of the GIL
        (re.match, [r"(a+)+$", "a" * 40 + "b"]),
        (pow, [9**9**5, 9**9]),
    ],
)
def test_a_call_that_is_late_is_stopped_and_another_process_takes_over(worker, function, arguments):
    pid = worker.call(os.getpid, timeout_s=10)
    start = time.monotonic()
    with pytest.raises(TimeLimitExceeded, match=r"took longer than 0\.3 s") as error:
        worker.call(function, *arguments, timeout_s=0.3)
    assert time.monotonic() - start < 20 and error.value.cause == "timeout"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert worker.call(os.getpid, timeout_s=10) != pid


def test_a_process_that_ended_between_calls_costs_none(worker):
    pid = worker.call(os.getpid, timeout_s=10)
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}").exists():  # until its fork server has reaped it
        time.sleep(0.01)
    assert worker.call(os.getpid, timeout_s=10) != pid


def test_other_threads_go_on_meanwhile(worker):
    done = []
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(worker.call, re.match, r"(a+)+$", "a" * 40 + "b", timeout_s=0.5)
        while not slow.done():
            done.append(time.monotonic())
            time.sleep(0.01)
        assert isinstance(slow.exception(), TimeLimitExceeded)
    assert done[-1] - done[0] < 20 and len(done) > 5


def test_a_worker_is_used_again_and_tells_what_was_raised(worker, capfd):
    assert worker.call(print, "not a reply", timeout_s=10) is None
    pids = {worker.call(os.getpid, timeout_s=10) for _ in range(5)}
    assert len(pids) == 1 and os.getpid() not in pids
    with pytest.raises(CallError, match=re.escape("raised ZeroDivisionError: Fraction(1, 0)")):
        worker.call(Fraction, 1, 0, timeout_s=10)
    with pytest.raises(CallError, match="SystemExit"):
        worker.call(sys.exit, timeout_s=10)
    with pytest.raises(CallError, match="raised TimeoutError: of a socket") as error:
        worker.call(raise_timeout, timeout_s=10)
    assert error.value.cause == "error", "a function's own timeout is not the limit"
    assert {worker.call(os.getpid, timeout_s=10)} == pids
    with pytest.raises(CallError, match="its process ended with status -6"):
        worker.call(os.abort, timeout_s=10)
    assert worker.call(os.getpid, timeout_s=10) not in pids


def raise_timeout() -> None:
    raise TimeoutError("of a socket")


def test_what_cannot_be_sent_or_returned_harms_no_other_call(worker):
    pid = worker.call(os.getpid, timeout_s=10)
    with pytest.raises(Exception, match="pickle"):
        worker.call(lambda: 7, timeout_s=10)
    with pytest.raises(CallError, match="pickle"):
        worker.call(memoryview, b"a", timeout_s=10)
    assert worker.call(os.getpid, timeout_s=10) == pid


def test_importing_a_function_is_no_part_of_its_time(worker, tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text(
        "import time\ntime.sleep(1)\nSEEN = []\ndef add(x):\n    SEEN.append(x)\n    return SEEN\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import slow_module  # pyright: ignore[reportMissingImports]

    assert worker.call(slow_module.add, 1, timeout_s=0.5) == [1]
    assert worker.call(slow_module.add, 2, timeout_s=0.5) == [1, 2] and not slow_module.SEEN


def test_a_worker_has_the_callers_environment_folder_and_search_path(tmp_path, monkeypatch, capfd):
    server = replace(workers.SERVER, process=None, requests=None)
    monkeypatch.setattr(workers, "SERVER", server)
    worker = Worker()
    monkeypatch.setenv("CANARY", "of the caller")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert worker.call(os.getenv, "CANARY", timeout_s=10) == "of the caller"
    assert worker.call(os.getcwd, timeout_s=10) == str(tmp_path)
    assert worker.call(search_path, timeout_s=10) == sys.path
    worker.call(print, "printed", timeout_s=10)
    assert capfd.readouterr().out == "printed\n"
    server.stop()


def search_path() -> list[str]:
    return sys.path


def test_workers_end_with_the_caller(tmp_path):
    code = "import os; from megarl.jail.workers import worker_of as w; print(w('a').call(os.getpid, timeout_s=9))"
    out = tmp_path / "out"
    assert os.system(f'{sys.executable} -c "{code}" >{out} 2>&1') == 0
    pid = int(out.read_text())
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}/exe").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert out.read_text() == f"{pid}\n"


def test_there_is_one_worker_of_a_name():
    assert worker_of("a") is worker_of("a") and worker_of("a") is not worker_of("b")
