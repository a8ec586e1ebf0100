"""Detects stopped and ended processes of the split topology, and reads GPUs, on every node.

    controller thread --names and process ids, every LOOK_S--> NodeWatch, one per node
    NodeWatch --messages--> stderr
              --ended processes--> Watch.gone
              --GPU metrics, once per step--> Watch.gather_gpus

A stopped process is reported after 5 s, killed after half of launch.timeout_s, and then replaced.
Ray cannot distinguish it from a slow process, but the kernel can (processes.heartbeat.is_stopped).
Ray reports a dead rank only to a caller, and during a rollout no rank is called.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.processes.children import descendants
from megarl.processes.exit_codes import say
from megarl.processes.heartbeat import STOPPED_S, is_stopped
from megarl.telemetry.gpus import GpuMonitor, open_gpus

LOOK_S = 2.0


@dataclass
class StoppedProcesses:
    """Tracks stopped processes on one node."""

    limit_s: float  # a process stopped for longer is killed
    _since: dict[int, float] = field(default_factory=dict)
    _said: set[int] = field(default_factory=set)

    def look(self, names: Mapping[str, int], now: float) -> tuple[list[str], list[str]]:
        """Checks processes {name: pid} and their descendants, and kills those stopped too long.

        `now` is in seconds. Returns (messages to print, names of processes that have ended).
        """
        lines = []
        for name, root in names.items():
            for pid in (root, *descendants(root)):
                if not is_stopped(pid):
                    self._since.pop(pid, None)
                    self._said.discard(pid)
                    continue
                seconds = now - self._since.setdefault(pid, now)
                text = f"{name} (process {pid})"
                if seconds >= self.limit_s:
                    lines.append(f"{text} has been stopped for {seconds:.0f} s; killing it")
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                elif seconds >= STOPPED_S and pid not in self._said:
                    self._said.add(pid)
                    lines.append(
                        f"{text} is stopped, by a signal or a debugger, for {seconds:.0f} s: "
                        f"`kill -CONT {pid}` continues it; it is killed after {self.limit_s:g} s"
                    )
        return lines, [name for name, pid in names.items() if not psutil.pid_exists(pid)]


@cache
def monitor_of(*gpus: int) -> GpuMonitor | None:
    return open_gpus(gpus)


@ray.remote(num_cpus=0, concurrency_groups={"gpus": 1})  # pyright: ignore[reportCallIssue]
class NodeWatch(StoppedProcesses):
    """A Ray actor that runs StoppedProcesses and reads GPUs, on one node."""

    @ray.method(concurrency_group="gpus")  # a GPU that hangs does not delay `look`
    def take_gpus(self, gpus: Sequence[int]) -> dict[str, float]:
        """Returns the metrics of a process's GPUs, by NVML's indices, since the last call."""
        monitor = monitor_of(*gpus)
        return monitor.take() if monitor else {}


class Watch:
    """Checks the processes of all nodes every LOOK_S in a background thread, until `end`.

    `node` is the id of the controller's node.
    """

    def __init__(self, timeout_s: float, node: str) -> None:
        self._limit_s = timeout_s / 2
        self._ended = threading.Event()
        self._places = {}
        self._nodes = {}
        self._gone = set()
        self._first = {node: ""}  # node -> the process that records its timeline
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()

    def add(self, name: str, actor: Any, place: tuple[str, list[int], int]) -> None:
        """Watches the process of an actor; replaces an earlier process with the same name.

        The first process on a node other than the controller's records the node's timeline.
        """
        node = place[0]
        if node not in self._nodes:
            strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            watch: Any = NodeWatch
            self._nodes[node] = watch.options(scheduling_strategy=strategy).remote(self._limit_s)
        self._places[name] = place
        if self._first.setdefault(node, name) == name:
            actor.record_calls.remote(list(self._first).index(node))

    def gone(self, kind: str) -> str | None:
        """Returns the name of a process of this kind ("rank" or "engine") that has ended, or None.

        A process is reported up to about LOOK_S after its end.
        """
        for name, (node, _, pid) in self._places.items():
            if name.startswith(kind) and (name, node, pid) in self._gone:
                return name
        return None

    def gather_gpus(self, own: Mapping[str, float]) -> list[Mapping[str, float]]:
        """Returns `own` and, for each GPU, the metrics since the last call of its process's GPUs.

        A node that does not reply within LOOK_S is left out.
        """
        calls = {
            self._nodes[node].take_gpus.remote(gpus): len(gpus)
            for node, gpus, _ in self._places.values()
            if gpus
        }
        replies, _ = ray.wait(list(calls), num_returns=len(calls), timeout=LOOK_S)
        metrics = [own]
        for reply in replies:
            with suppress(RayError):
                metrics += [ray.get(reply)] * calls[reply]
        return metrics

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            for node, actor in list(self._nodes.items()):
                names = {
                    name: pid
                    for name, (where, _, pid) in list(self._places.items())
                    if where == node
                }
                look = actor.look.remote(names, time.monotonic())
                try:
                    lines, gone = ray.get(look, timeout=5 * LOOK_S)
                except RayError:
                    is_alive = any(each["Alive"] for each in ray.nodes() if each["NodeID"] == node)
                    lines = []
                    gone = [] if is_alive else names
                self._gone.update((name, node, names[name]) for name in gone)
                for line in lines:
                    say(line)
