"""Processes of the split topology that are stopped; tests/e2e/test_split.py stops those of a run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from megarl.launch.watch import StoppedProcesses

PARENT = "import subprocess; print(subprocess.Popen(['sleep', '99']).pid, flush=True); input()"


def test_a_stopped_process_is_named_and_then_killed_and_a_slow_one_is_not() -> None:
    command = [sys.executable, "-c", PARENT]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout
        child, names, watch = int(parent.stdout.readline()), {"engine 1": parent.pid}, StoppedProcesses(30.0)
        try:
            assert watch.look(names, 0) == []
            _stop(child)
            assert watch.look(names, 10) == watch.look(names, 14) == []
            (line,) = watch.look(names, 16)
            assert line.startswith(
                f"engine 1 (process {child}) is stopped, by a signal or a debugger, for 6 s: `kill -CONT"
            )
            assert watch.look(names, 20) == [], "once"
            subprocess.run(["kill", "-CONT", str(child)], check=True)
            time.sleep(0.1)
            assert watch.look(names, 100) == []
            _stop(child)
            assert watch.look(names, 101) == [], "from the beginning"
            assert watch.look(names, 131.5) == [f"engine 1 (process {child}) has been stopped for 30 s; killing it"]
            time.sleep(0.2)
            assert watch.look(names, 140) == [] and parent.poll() is None
        finally:
            subprocess.run(["kill", "-9", str(child)], stderr=subprocess.DEVNULL)
            parent.kill()


def _stop(pid: int) -> None:
    subprocess.run(["kill", f"-{signal.SIGSTOP.value}", str(pid)], check=True)
    time.sleep(0.1)


@pytest.mark.parametrize("names", [{}, {"rank 0": 2**22 + 1}])
def test_what_has_ended_is_not_stopped(names: dict[str, int]) -> None:
    assert StoppedProcesses(1.0).look(names, 0) == []
