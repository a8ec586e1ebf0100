"""Memory that a launcher shares with its ranks: where they meet, whether each is alive, and why it failed.

    launcher --two memfds, inherited--> ranks: a FileStore over one of them; in the other, a slot for each rank
    rank:     a thread --beat and phase, every BEAT_S--> its slot; at the end its failure
    launcher: Heartbeats.check --> a warning, then a Failure, for a rank that is stopped or shows no sign of life

The memory has no name, so no other user and no other host can open it, a full disk does not matter, and nothing is
left behind. A store without a server also outlives any stopped rank.

To its peers a stopped process looks like a slow one. The kernel knows the difference: the state of a process that a
signal or a debugger has stopped is T. Without a beat, but not stopped, a rank may be in a long call that holds the
GIL; it gets twice the time.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from megarl.launch.exit_codes import REFUSED, CurrentPhase, Failure
from megarl.platform.env import Env

BEAT_S = 0.5
STOPPED_S, SILENT_S = 5.0, 60.0  # until a rank that is stopped, or silent, is reported
MAX_ELAPSED_S = 1.0  # between two checks; a launcher that was itself stopped has seen nothing
SLOT_BYTES = 1 << 16
HEAD = struct.Struct("<QI64s")  # beats, bytes of the failure after the head, phase


def shared_memory(name: str) -> int:
    """Returns a file descriptor of new, empty memory; it must be passed on to the ranks."""
    return os.memfd_create(f"megarl-{name}")


def make_store(env: Env, timeout: timedelta) -> Any:
    """The store in which the ranks of megarl's own launcher meet; its operations raise after `timeout`."""
    import torch.distributed as dist

    if env.launched:
        os.set_inheritable(env.store_fd, False)  # not for the processes that a rank starts
        store: Any = dist.FileStore(f"/proc/self/fd/{env.store_fd}", env.world_size)  # pyright: ignore[reportPrivateImportUsage]
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    store.set_timeout(timeout)
    return store


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of all ranks: HEAD and a failure record. Each rank writes its own."""

    fd: int

    def start_beating(self, rank: int, phase: CurrentPhase) -> None:
        os.set_inheritable(self.fd, False)
        threading.Thread(target=self._beat, args=(rank, phase), name="heartbeat", daemon=True).start()

    def _beat(self, rank: int, phase: CurrentPhase) -> None:
        beats = 0
        while True:
            beats += 1
            head = HEAD.pack(beats, 0, phase.name.encode()[:64])
            os.pwrite(self.fd, head[:8], rank * SLOT_BYTES)
            os.pwrite(self.fd, head[12:], rank * SLOT_BYTES + 12)
            time.sleep(BEAT_S)

    def read(self, rank: int) -> tuple[int, str]:
        """Returns (beats, phase)."""
        beats, _, phase = self._head(rank)
        return beats, phase.rstrip(b"\0").decode(errors="replace")

    def write_failure(self, rank: int, record: str) -> None:
        data = record.encode(errors="replace")[: SLOT_BYTES - HEAD.size]
        os.pwrite(self.fd, data, rank * SLOT_BYTES + HEAD.size)
        os.pwrite(self.fd, len(data).to_bytes(4, "little"), rank * SLOT_BYTES + 8)  # last: now it can be read

    def failure(self, rank: int) -> str:
        """Returns what the rank wrote, or ""."""
        return os.pread(self.fd, self._head(rank)[1], rank * SLOT_BYTES + HEAD.size).decode(errors="replace")

    def _head(self, rank: int) -> tuple[int, int, bytes]:
        return HEAD.unpack(os.pread(self.fd, HEAD.size, rank * SLOT_BYTES).ljust(HEAD.size, b"\0"))


@dataclass
class _Silence:
    beats: int = 0  # at the last sign of life
    seconds: float = 0.0  # since then
    is_reported: bool = False


@dataclass
class Heartbeats:
    """The launcher's view of its ranks."""

    slots: Slots
    timeout_s: float  # launch.timeout_s
    _silences: dict[int, _Silence] = field(default_factory=dict)
    _checked: float = field(default_factory=time.monotonic)

    def check(self, pids: Mapping[int, int]) -> Failure | None:
        """Looks at the running ranks, {rank: process id}, every BEAT_S; returns the failure of one that is overdue."""
        elapsed = time.monotonic() - self._checked
        if elapsed < BEAT_S:
            return None
        self._checked += elapsed
        late = [self._late(rank, pid, min(elapsed, MAX_ELAPSED_S)) for rank, pid in pids.items()]
        return next((failure for failure in late if failure), None)

    def _late(self, rank: int, pid: int, elapsed: float) -> Failure | None:
        silence, (beats, phase) = self._silences.setdefault(rank, _Silence()), self.slots.read(rank)
        if beats != silence.beats:
            if silence.is_reported:
                _report(f"rank {rank} goes on")
            self._silences[rank] = _Silence(beats)
            return None
        silence.seconds += elapsed
        stopped = is_stopped(pid)
        state = "is stopped, by a signal or a debugger" if stopped else "shows no sign of life"
        limit = self.timeout_s / 2 if stopped else self.timeout_s
        message = f"rank {rank} (process {pid}) {state}, since {silence.seconds:.0f} s"
        if silence.seconds >= limit:
            remedy = "" if stopped else "; the end of its log shows where; raise launch.timeout_s if it is only slow"
            return Failure(rank, REFUSED, f"{message}; limit {limit:g} s{remedy}", phase or "start-up")
        if not silence.is_reported and silence.seconds >= (STOPPED_S if stopped else SILENT_S):
            silence.is_reported = True
            remedy = f"`kill -CONT {pid}` continues it" if stopped else "a long call, or a disk or device that hangs"
            _report(f"{message} ({phase or 'start-up'}): {remedy}; the run ends after {limit:g} s")
        return None


def is_stopped(pid: int) -> bool:
    """Whether a signal (T) or a debugger (t) has stopped the process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):  # it has ended
        return False


def _report(text: str) -> None:
    print(f"megarl: {text}", file=sys.stderr, flush=True)
