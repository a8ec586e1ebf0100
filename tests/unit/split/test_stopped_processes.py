"""Processes of the split topology that are stopped; tests/e2e/test_split.py stops those of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.split import stopped_processes as watch
from megarl.split.stopped_processes import StoppedProcesses

PARENT = "import subprocess; print(subprocess.Popen(['sleep', '99']).pid, flush=True); input()"


def test_a_stopped_process_is_named_and_then_killed_and_a_slow_one_is_not() -> None:
    command = [sys.executable, "-c", PARENT]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout
        child, names, stopped = (
            int(parent.stdout.readline()),
            {"engine 1": parent.pid},
            StoppedProcesses(30.0),
        )

        def look(now: float) -> list[str]:
            return stopped.look(names, now)[0]

        try:
            assert look(0) == []
            _stop(child)
            assert look(10) == look(14) == []
            (line,) = look(16)
            assert line.startswith(
                f"engine 1 (process {child}) is stopped, by a signal or a debugger, for 6 s: `kill -CONT"
            )
            assert look(20) == [], "once"
            subprocess.run(["kill", "-CONT", str(child)], check=True)
            time.sleep(0.1)
            assert look(100) == []
            _stop(child)
            assert look(101) == [], "from the beginning"
            assert look(131.5) == [
                f"engine 1 (process {child}) has been stopped for 30 s; killing it"
            ]
            time.sleep(0.2)
            assert look(140) == [] and parent.poll() is None
        finally:
            subprocess.run(["kill", "-9", str(child)], stderr=subprocess.DEVNULL)
            parent.kill()


def _stop(pid: int) -> None:
    subprocess.run(["kill", f"-{signal.SIGSTOP.value}", str(pid)], check=True)
    time.sleep(0.1)


@pytest.mark.parametrize("names", [{}, {"rank 0": 2**22 + 1}])
def test_what_has_ended_is_not_stopped_but_gone(names: dict[str, int]) -> None:
    stopped = StoppedProcesses(1.0)
    assert stopped.look(names | {"rank 1": os.getpid()}, 0) == ([], [*names])


def test_who_is_gone_is_known_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is started again is not what its predecessor was."""
    node, nodes = "ab" * 28, [{"NodeID": "ab" * 28, "Alive": True}]
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    monkeypatch.setattr(watch, "NodeWatch", InProcess)
    monkeypatch.setattr(watch.ray, "get", lambda values, timeout: values)
    monkeypatch.setattr(watch.ray, "nodes", lambda: nodes)
    own = watch.Watch(30.0)
    try:
        own.add("engine 0", node, os.getpid())
        own.add("rank 0", node, 2**22 + 1)
        while own.gone("rank") is None:
            time.sleep(0.01)
        assert own.gone("rank") == "rank 0" and own.gone("engine") is None
        own.add("rank 0", node, os.getpid())
        time.sleep(0.1)
        assert own.gone("rank") is None
        monkeypatch.setattr(watch.ray, "get", refuse)
        time.sleep(0.1)
        assert own.gone("rank") is None, "a slow node"
        nodes[0]["Alive"] = False
        while own.gone("rank") is None:
            time.sleep(0.01)
    finally:
        own.end()


def refuse(*_: Any, **__: Any) -> Any:
    raise watch.RayError


class InProcess:
    """Stands in for Ray's actor."""

    def __init__(self, limit_s: float) -> None:
        of_node = StoppedProcesses(limit_s)
        self.look = SimpleNamespace(remote=of_node.look)

    @classmethod
    def options(cls, **_: Any) -> Any:
        return SimpleNamespace(remote=cls)
