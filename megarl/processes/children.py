"""Watches this process's descendants: reports at once that one has ended, before a call that waits
for its answer times out, and kills all of them and unlinks their shared memory.

    psutil --pids, their segments in /dev/shm--> Children --pidfd, event loop--> on_lost(cause)
"""

import asyncio
import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

SEGMENT = re.compile(r"(/dev/shm/\S+)$", re.MULTILINE)  # matches lines of /proc/<pid>/maps
OWN_SEGMENTS = re.compile(r"/(psm_|vllm|megarl|-tp|sem\.)")  # excludes Ray's object store


@dataclass
class Children:
    pids: dict[int, str]  # process id -> name
    segments: set[str]  # shared-memory segments that this process and its descendants have mapped
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of_this_process(cls) -> "Children":
        pids = {}
        segments = set()
        this = psutil.Process()
        for process in (this, *this.children(recursive=True)):
            with suppress(OSError, psutil.NoSuchProcess):  # it has ended
                pids[process.pid] = process.name()
                segments.update(SEGMENT.findall(Path(f"/proc/{process.pid}/maps").read_text()))
        del pids[this.pid]
        return cls(pids, {name for name in segments if OWN_SEGMENTS.search(name)})

    def watch(self, loop: asyncio.AbstractEventLoop, on_lost: Callable[[str], None]) -> None:
        """Calls `on_lost(cause)` in the event loop `loop` for each process that ends."""

        def ended(handle: int, pid: int, name: str) -> None:
            loop.remove_reader(handle)
            os.close(handle)
            on_lost(f"its process {name} ({pid}) has ended")

        for pid, name in self.pids.items():
            with suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                loop.add_reader(handle, ended, handle, pid, name)

    def end(self) -> None:
        """Kills the remaining processes and their descendants, and unlinks the segments."""
        for pid in {*self.pids, *descendants(os.getpid())}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in self.segments:
            with suppress(OSError):
                Path(name).unlink()


def descendants(pid: int) -> list[int]:
    """Returns the process ids of the children of `pid`, and of their descendants."""
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []
