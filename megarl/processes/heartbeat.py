"""Memory that a launcher shares with its ranks: where they meet, whether each is alive, and why it
failed.

    launcher --two memfds, inherited--> ranks: a FileStore over one; in the other, a slot a rank
    rank:     a thread --StackSampler.beat, every BEAT_S--> its slot; at the end its failure
    launcher: Heartbeats.check --> a warning, then a Failure, for a stopped, silent or stuck rank

The memory has no name, so no other user and no other host can open it, a full disk does not matter,
and nothing is left behind. A store without a server also outlives any stopped rank.

To its peers a stopped process looks like a slow one, but the kernel knows. A rank that is silent
without being stopped may be in a call that holds the GIL, and gets almost twice the time. One that
beats, but does not move, is judged by processes.late_ranks. Under torchrun the observer reads the
beats from the job's store (processes.torchrun_watch).
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from megarl.platform.env import Env
from megarl.processes.exit_codes import REFUSED, CurrentPhase, Failure, say
from megarl.processes.late_ranks import HOST, RankState, StackSampler, find_late

BEAT_S = 0.5
# until a rank that is stopped, or silent, is reported
STOPPED_S = 5.0
SILENT_S = 30.0
SILENT = 0.9  # of the time-out, so that the run ends before the peers of a silent rank fail
SLOW = "is late, but not stuck"
SLOT_BYTES = 1 << 16
STATE_BYTES = 1 << 12
FAILURE_BYTES = SLOT_BYTES - STATE_BYTES


def shared_memory(name: str) -> int:
    """Returns a file descriptor of new, empty memory; it must be passed on to the ranks."""
    return os.memfd_create(f"megarl-{name}")


def make_store(env: Env, timeout: timedelta) -> Any:
    """The store in which the ranks of megarl's own launcher meet; its operations raise after
    `timeout`.
    """
    import torch.distributed as dist

    if env.launched:
        os.set_inheritable(env.store_fd, False)  # not for the processes that a rank starts
        make = dist.FileStore  # pyright: ignore[reportPrivateImportUsage]
        store = make(f"/proc/self/fd/{env.store_fd}", env.world_size)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    store.set_timeout(timeout)
    return store


@dataclass(frozen=True)
class Slots:
    """The slots of all ranks: the last beat, and one line with the failure.

    Each rank writes its own.
    """

    fd: int

    def start_beating(self, rank: int, phase: CurrentPhase) -> None:
        os.set_inheritable(self.fd, False)
        sampler = StackSampler(phase)

        def run() -> None:
            while True:
                beat = sampler.beat().encode(errors="replace")[:STATE_BYTES]
                os.pwrite(self.fd, beat.ljust(STATE_BYTES), rank * SLOT_BYTES)
                time.sleep(BEAT_S)

        threading.Thread(target=run, name="heartbeat", daemon=True).start()

    def read(self, rank: int) -> str:
        """Returns the newest beat."""
        return os.pread(self.fd, STATE_BYTES, rank * SLOT_BYTES).decode(errors="replace")

    def write_failure(self, rank: int, record: str) -> None:
        start = rank * SLOT_BYTES + STATE_BYTES
        data = record.encode(errors="replace")[: FAILURE_BYTES - 1]
        os.pwrite(self.fd, data, start)
        os.pwrite(self.fd, b"\n", start + len(data))  # last: now it can be read

    def failure(self, rank: int) -> str:
        """Returns what the rank wrote, or ""."""
        data = os.pread(self.fd, FAILURE_BYTES, rank * SLOT_BYTES + STATE_BYTES)
        return data[: data.find(b"\n") + 1].decode(errors="replace").rstrip()


@dataclass
class Heartbeats:
    """The observer's view of the ranks: of megarl's launcher or, under torchrun, of a thread in a
    rank.
    """

    read: Callable[[int], str]  # rank -> its newest beat
    timeout_s: float  # launch.timeout_s
    every_s: float = BEAT_S  # between two checks
    say: Callable[[str], object] = say
    states: dict[int, RankState] = field(default_factory=dict)  # the newest of each rank
    # the rank that is late now: what its peers report is a consequence
    suspect: Failure | None = None
    # rank -> (number of the newest beat, seconds since then)
    _silences: dict[int, tuple[str, float]] = field(default_factory=dict)
    _reported: set[tuple[int, str]] = field(default_factory=set)  # (rank, how it is late)
    _checked: float = field(default_factory=time.monotonic)

    def check(self, pids: Mapping[int, int]) -> Failure | None:
        """Looks at the running ranks, {rank: process id, 0 if unknown}; returns the failure of one
        that is overdue.
        """
        elapsed = time.monotonic() - self._checked
        if elapsed < self.every_s:
            return None
        self._checked += elapsed
        for rank in pids:
            beats, _, text = self.read(rank).partition(" ")
            last, seconds = self._silences.get(rank, ("", 0.0))
            # an observer that was itself stopped has seen nothing
            seconds += min(elapsed, 2 * self.every_s)
            self._silences[rank] = beats, seconds * (beats == last)
            with suppress(ValueError, TypeError):  # none yet, or it is being written
                self.states[rank] = RankState(*json.loads(text))
        silent = [
            rank for rank in pids if self._silences[rank][1] >= min(STOPPED_S, self.timeout_s / 2)
        ]
        stalled, waiting = find_late(
            {rank: self.states[rank] for rank in pids if rank in self.states}
        )
        found = [
            late for rank in silent or stalled if (late := self._late(rank, pids[rank], waiting))
        ]
        for rank, how in self._reported - {(late.rank, how) for late, how, _ in found}:
            if how != SLOW:
                self._reported.remove((rank, how))
                self.say(f"rank {rank} goes on")
        self.suspect = found[0][0] if found else None
        return next((late for late, _, is_overdue in found if is_overdue), None)

    def _late(
        self, rank: int, pid: int, waiting: Sequence[int]
    ) -> tuple[Failure, str, bool] | None:
        """Reports how a rank is late, once; returns it as a failure, how, and whether the run must
        end.
        """
        state = self.states.get(rank)
        _, seconds = self._silences[rank]
        pid = pid or (state.pid if state and state.host == HOST else 0)
        limit_s = math.inf
        waits = max((self.states[peer].seconds for peer in waiting), default=0.0)
        if seconds >= min(STOPPED_S, self.timeout_s / 2):
            how = "shows no sign of life"
            remedy = "a call, disk or node that hangs"
            limit_s = SILENT * self.timeout_s
            if pid and is_stopped(pid):
                how = "is stopped, by a signal or a debugger"
                remedy = f"`kill -CONT {pid}` continues it"
                limit_s = self.timeout_s / 2
            elif seconds < min(SILENT_S, limit_s) or not (
                pid or state
            ):  # under torchrun it has not begun
                return None
        elif not state or state.is_waiting:
            how = "waits where most ranks do not"
            remedy = "it left out or added a collective"
            seconds = waits
        elif state.is_stuck and not state.is_limited:
            how = "neither moves nor computes"
            remedy = "the stack shows where it hangs"
            seconds = state.seconds
            if waiting:
                seconds = min(waits, seconds)
                limit_s = self.timeout_s / 2
        else:
            how = SLOW
            remedy = "wait, or look at the stack"
            seconds = max(waits, state.seconds)
        where = f" on {state.host}" * (state.host != HOST) if state else ""
        process = pid or (state and state.pid)
        text = f"rank {rank} (process {process}{where}) {how}, for {seconds:.0f} s"
        text += f" ({state or 'start-up'}){self._victims(rank)}: {remedy}"
        if limit_s < math.inf:
            text += f"; the run ends after {limit_s:g} s"
        if (rank, how) not in self._reported:
            self._reported.add((rank, how))
            self.say(text)
        return (
            Failure(rank, REFUSED, text, state.phase if state else "start-up"),
            how,
            seconds >= limit_s,
        )

    def _victims(self, late: int) -> str:
        """What another rank waits in; a stopped rank's own state is that of its last beat."""
        waits = [
            (state.seconds, rank)
            for rank, state in self.states.items()
            if state.is_waiting and rank != late
        ]
        if not waits:
            return ""
        seconds, rank = max(waits)
        return f"; waiting: {len(waits)}, rank {rank} for {seconds:.0f} s ({self.states[rank]})"


def is_stopped(pid: int) -> bool:
    """Returns True if a signal (T) or a debugger (t) has stopped the process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):  # it has ended
        return False
