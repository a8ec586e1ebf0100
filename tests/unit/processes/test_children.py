"""Child processes: one that ends is noticed at once; ending them takes their children and segments too."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from megarl.processes.children import Children, descendants

CHILD = """
import subprocess, sys, time
from multiprocessing import shared_memory
segment = shared_memory.SharedMemory(create=True, size=64, track=False) if sys.version_info >= (3, 13) else \
    shared_memory.SharedMemory(create=True, size=64)
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(segment.name, grandchild.pid, flush=True)
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_lost_child_is_noticed_and_its_family_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    segment, grandchild = child.stdout.readline().split()
    children = Children.of_this_process()
    assert {
        child.pid,
        int(grandchild),
    } <= children.pids.keys() and f"/dev/shm/{segment}" in children.segments
    causes: list[str] = []

    async def lose() -> float:
        lost = asyncio.Event()
        children.watch(asyncio.get_running_loop(), lambda cause: (causes.append(cause), lost.set()))
        os.kill(child.pid, signal.SIGKILL)
        began = time.monotonic()
        await asyncio.wait_for(lost.wait(), 5)
        return time.monotonic() - began

    assert asyncio.run(lose()) < 2 and f"({child.pid})" in causes[0]
    assert Path(f"/proc/{grandchild}").exists()
    mine = Children({int(grandchild): ""}, children.segments)
    mine.end()
    child.wait()
    deadline = time.monotonic() + 5
    while is_alive(int(grandchild)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(int(grandchild))
    assert not Path(f"/dev/shm/{segment}").exists()
    assert child.pid not in descendants(os.getpid())
