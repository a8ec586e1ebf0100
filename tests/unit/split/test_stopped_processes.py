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
from megarl.telemetry.gpus import over_nodes

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
    own = watch.Watch(30.0, node)
    try:
        own.add("engine 0", None, (node, [], os.getpid()))
        own.add("rank 0", None, (node, [], 2**22 + 1))
        while own.gone("rank") is None:
            time.sleep(0.01)
        assert own.gone("rank") == "rank 0" and own.gone("engine") is None
        own.add("rank 0", None, (node, [], os.getpid()))
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


def test_gpus_of_all_nodes_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean over GPUs, though an engine has two; without a node that is gone, late or without NVML."""
    powers = {(0,): 100.0, (1,): 200.0, (2, 3): 600.0, (4,): 999.0, (5,): 999.0, (6,): None}
    opened = list[Any]()

    def open_gpus(gpus: Any) -> Any:
        opened.append(gpus)
        values = {"gpu/power_w/mean": powers[gpus], "gpu/power_w/max": powers[gpus]}
        return SimpleNamespace(take=lambda: values) if powers[gpus] else None

    def get(call: Any, timeout: float | None = None) -> Any:
        take, gpus = call
        if gpus == (4,):
            raise watch.RayError
        return take(gpus)

    def wait(calls: Any, num_returns: int, timeout: float) -> Any:
        assert num_returns == len(calls) and timeout == watch.LOOK_S
        late = [call for call in calls if call[1] == (5,)]
        return [call for call in calls if call not in late], late

    monkeypatch.setattr(watch, "LOOK_S", 99.0)
    monkeypatch.setattr(watch, "NodeWatch", InProcess)
    monkeypatch.setattr(watch, "open_gpus", open_gpus)
    monkeypatch.setattr(watch.ray, "wait", wait)
    monkeypatch.setattr(watch.ray, "get", get)
    own = watch.Watch(30.0, "a" * 56)
    try:
        for name, node, *gpus in (
            ("rank 0", "a", 0),
            ("rank 1", "b", 1),
            ("engine 0", "b", 2, 3),
            ("engine 1", "c", 4),
            ("engine 2", "d", 5),
            ("engine 3", "e", 6),
            ("engine 4", "e"),
        ):
            own.add(name, Recorded(), (node * 56, tuple(gpus), 1))
        for _ in range(2):
            metrics = over_nodes(own.gather_gpus({}))
            assert metrics == {"gpu/power_w/mean": 1500.0 / 4, "gpu/power_w/max": 600.0}
        assert opened == [(0,), (1,), (2, 3), (6,)], "once"
    finally:
        own._ended.set()
        watch.monitor_of.cache_clear()


class Recorded:
    """An actor, and the numbers of the nodes whose timeline it records."""

    def __init__(self) -> None:
        self.nodes = list[int]()
        self.record_calls = SimpleNamespace(remote=self.nodes.append)


def test_one_process_records_the_timeline_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller records that of its own; a process that is started again goes on with that of its predecessor."""
    monkeypatch.setattr(watch, "NodeWatch", InProcess)
    own = watch.Watch(30.0, "a" * 56)
    try:
        for name, node, numbers in (
            ("rank 0", "a", []),
            ("rank 1", "b", [1]),
            ("rank 2", "b", []),
            ("engine 0", "b", []),
            ("engine 1", "c", [2]),
            ("rank 1", "b", [1]),
            ("engine 1", "a", []),
            ("engine 1", "d", [3]),
        ):
            actor = Recorded()
            own.add(name, actor, (node * 56, [], 1))
            assert actor.nodes == numbers, (name, node)
    finally:
        own._ended.set()


def refuse(*_: Any, **__: Any) -> Any:
    raise watch.RayError


class InProcess:
    """Ray's actor, in this process."""

    kind = watch.NodeWatch.__ray_metadata__.modified_class

    def __init__(self, limit_s: float) -> None:
        of_node = self.kind(limit_s)
        self.look = SimpleNamespace(remote=of_node.look)
        self.take_gpus = SimpleNamespace(remote=lambda gpus: (of_node.take_gpus, gpus))

    @classmethod
    def options(cls, **_: Any) -> Any:
        return SimpleNamespace(remote=cls)
