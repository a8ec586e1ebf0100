"""Reports the state of each rank, detects late ranks and passes on failures.

The launcher uses this module without importing torch.

    launcher --two inherited memfds--> ranks: a FileStore over one, a slot per rank in the other
    rank:     a thread --StackSampler.beat, every BEAT_S--> its slot; at the end its failure
    launcher: Heartbeats.check --> a warning, then a Failure, for a stopped, silent or stuck rank

    under torchrun, FailureWatch:
    each rank: beat --every STORE_BEAT_S--> key in the job's store --> rank 0: Heartbeats.check
    a failing rank, or rank 0 for a late one --broadcast--> key --a thread per rank--> ranks exit

A memfd has no name, so no other user or host can open it, it needs no disk, and nothing is left
behind. The FileStore has no server, so it also survives a stopped rank. Under torchrun, the last
rank observes rank 0. A stopped rank cannot exit: torchrun kills it after another rank of its node
has exited; if it is alone on its node, `srun --kill-on-bad-exit` does.

To its peers, a stopped process looks like a slow one, but the kernel reports it as stopped. A rank
that is silent without being stopped may be in a call that holds the GIL; it gets almost twice the
time. A rank counts as waiting if its main thread is in a communication call. It counts as stuck if
it does not wait and has neither moved nor computed for STALL_S. So there is no need to compare the
collectives of ranks, which differ between pipeline stages. (torch's flight recorder does not help:
it reports gloo's finished collectives as open, and reading it takes 60 ms.)
"""

import json
import math
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from megarl.platform.env import Env, get_env
from megarl.processes.exit_codes import (
    REFUSED,
    CurrentPhase,
    Failure,
    parse_record,
    say,
    to_record,
)

BEAT_S = 0.5
# seconds without a beat until a stopped or a silent rank is reported
STOPPED_S = 5.0
SILENT_S = 30.0
SILENT = 0.9  # share of the time-out, so that the run ends before a silent rank's peers fail
SLOW = "is late, but not stuck"
SLOT_BYTES = 1 << 16
STATE_BYTES = 1 << 12
FAILURE_BYTES = SLOT_BYTES - STATE_BYTES
STALL_S = 30.0  # seconds in one place until a rank counts as waiting or stuck
BUSY_CPU = 0.05  # share of a core above which a rank counts as computing
WAITS = re.compile(
    r"/(torch|vllm)/distributed/"
    r"|/(p2p_communication|param_and_grad_buffer|transports/collective)\.py$"
)
WRAPPERS = ("/torch/_ops.py", "/torch/utils/_contextlib.py", "/c10d_logger.py")
SHOWN_FRAMES = 4
# under torchrun: keys of the job's store, and periods
FAILED = "megarl/failed"
BEAT = "megarl/beat"
POLL_S = 1.0
STORE_BEAT_S = 5.0
CONNECT_S = 60
HOST = socket.gethostname()


class RankState(NamedTuple):
    """A sample of what a rank is doing."""

    pid: int
    host: str
    phase: str
    operation: str  # an engine step, or empty
    is_waiting: bool  # waits for other ranks
    # True where another time limit applies: in rewards (other programs) and start-up (disks,
    # compilers)
    is_limited: bool
    seconds: float  # since the stack, the phase or the engine step changed
    cpu_s: float  # CPU time of all threads in these seconds
    stack: str  # innermost frames

    @property
    def is_stuck(self) -> bool:
        return (
            not self.is_waiting and self.seconds >= STALL_S and self.cpu_s < self.seconds * BUSY_CPU
        )

    def __str__(self) -> str:
        return f"{self.phase}{self.operation and ', '}{self.operation}, at {self.stack}"


@dataclass
class StackSampler:
    """Samples the main thread of this process; called from another thread."""

    phase: CurrentPhase
    _place: Any = None
    _began: float = 0.0
    _cpu: float = 0.0
    _beats: int = 0

    def beat(self) -> str:
        """Returns the number of this beat and, unless sampling fails, the rank's state as JSON."""
        self._beats += 1
        state = ""
        with suppress(Exception):  # beats must go on: a rank without beats counts as dead
            state = json.dumps(self.sample())
        return f"{self._beats} {state}"

    def sample(self) -> RankState:
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        frames = [
            (f.f_code.co_filename, line, f.f_code.co_name)
            for f, line in traceback.walk_stack(main)
            if not f.f_code.co_filename.endswith(WRAPPERS)
        ]
        phase = self.phase.name
        steps = self.phase.engine_steps
        if (place := (frames, phase, steps)) != self._place:
            self._place = place
            self._began = time.monotonic()
            self._cpu = time.process_time()
        shown = [
            f"{name} ({'/'.join(Path(file).parts[-2:])}:{line})"
            for file, line, name in frames[:SHOWN_FRAMES]
        ]
        return RankState(
            os.getpid(),
            HOST,
            phase,
            f"engine step {steps}" * (phase == "rollout"),
            bool(frames and WAITS.search(frames[0][0])),
            phase == "start-up" or any("/megarl/rewards/" in file for file, _, _ in frames),
            time.monotonic() - self._began,
            time.process_time() - self._cpu,
            " < ".join(shown),
        )


def find_late(states: Mapping[int, RankState]) -> tuple[list[int], list[int]]:
    """Returns (late ranks, waiting ranks).

    Stuck ranks are late. If no rank is stuck but some wait, the other ranks are late, though only
    slow. If all wait, the ranks that wait in another phase or operation than most are late: they
    left out or added a collective.
    """
    waiting = [
        rank for rank, state in states.items() if state.is_waiting and state.seconds >= STALL_S
    ]
    if stuck := [
        rank
        for rank, state in states.items()
        if state.is_stuck and (waiting or not state.is_limited)
    ]:
        return stuck, waiting
    if len(waiting) < len(states):
        return [rank for rank, state in states.items() if waiting and not state.is_waiting], waiting
    places = {rank: (state.phase, state.operation) for rank, state in states.items()}
    usual = [place for place, _ in Counter(places.values()).most_common(1)]
    return [rank for rank, place in places.items() if place not in usual], waiting


def make_store(env: Env, timeout: timedelta) -> Any:
    """Returns the rendezvous store of ranks under megarl's launcher, or else a HashStore of this
    process alone. Its operations raise an error after `timeout`.
    """
    import torch.distributed as dist

    if env.launched:
        os.set_inheritable(env.store_fd, False)  # child processes of a rank must not inherit it
        make = dist.FileStore  # pyright: ignore[reportPrivateImportUsage]
        store = make(f"/proc/self/fd/{env.store_fd}", env.world_size)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    store.set_timeout(timeout)
    return store


@dataclass(frozen=True)
class Slots:
    """Shared memory with a slot per rank: the rank's newest beat, and a line with its failure.

    Each rank writes its own slot.
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
        os.pwrite(self.fd, b"\n", start + len(data))  # last: marks the record as complete

    def failure(self, rank: int) -> str:
        """Returns the rank's complete failure record, or ""."""
        data = os.pread(self.fd, FAILURE_BYTES, rank * SLOT_BYTES + STATE_BYTES)
        return data[: data.find(b"\n") + 1].decode(errors="replace").rstrip()


@dataclass
class Heartbeats:
    """An observer's view of the ranks. The observer is megarl's launcher or, under torchrun, a
    thread in a rank.
    """

    read: Callable[[int], str]  # rank -> its newest beat
    timeout_s: float  # launch.timeout_s
    every_s: float = BEAT_S  # shortest time between two checks
    say: Callable[[str], object] = say
    states: dict[int, RankState] = field(default_factory=dict)  # the newest state of each rank
    # failure of the rank that is late now; failures of its peers are consequences
    suspect: Failure | None = None
    # rank -> (number of the newest beat, seconds since then)
    _silences: dict[int, tuple[str, float]] = field(default_factory=dict)
    _reported: set[tuple[int, str]] = field(default_factory=set)  # (rank, how it is late)
    _checked: float = field(default_factory=time.monotonic)

    def check(self, pids: Mapping[int, int]) -> Failure | None:
        """Checks the running ranks `pids`, {rank: process id (0 if unknown)}.

        Reports ranks that are late. Returns the failure of one for which the run must end, or None.
        """
        elapsed = time.monotonic() - self._checked
        if elapsed < self.every_s:
            return None
        self._checked += elapsed
        for rank in pids:
            beats, _, text = self.read(rank).partition(" ")
            last, seconds = self._silences.get(rank, ("", 0.0))
            # an observer that was itself stopped may have missed beats, so the time is capped
            seconds += min(elapsed, 2 * self.every_s)
            self._silences[rank] = beats, seconds * (beats == last)
            with suppress(ValueError, TypeError):  # no state yet, or one that is being written
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
        """Reports once how a rank is late. Returns (failure, how it is late, True if the run must
        end), or None if the rank has not begun or it is too early to report it.
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
            ):  # under torchrun, the rank has not begun
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
        """Describes the ranks blocked by `late`, from their last beats; "" if there are none."""
        waits = [
            (state.seconds, rank)
            for rank, state in self.states.items()
            if state.is_waiting and rank != late
        ]
        if not waits:
            return ""
        seconds, rank = max(waits)
        return f"; waiting: {len(waits)}, rank {rank} for {seconds:.0f} s ({self.states[rank]})"


class FailureWatch:
    """Ends this process when a failure is broadcast: calls `on_failure(failure)`, then exits with
    the failure's code.

    Uses a separate connection to the job's store, because the connection of the process group
    blocks during collectives.
    """

    def __init__(
        self,
        env: Env,
        phase: CurrentPhase,
        timeout_s: float,
        on_failure: Callable[..., object],
        say: Callable[..., object],
    ) -> None:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        self._sampler = StackSampler(phase)
        self._on_failure = on_failure
        self._rank = env.rank
        # without torchrun's agent, rank 0 serves the store for this watch and the process group
        serves = env.is_main and get_env("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._store = TCPStore(
            env.master_addr,
            env.master_port,
            is_master=serves,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_S),
            multi_tenant=True,
        )
        self._heartbeats = Heartbeats(self._read, timeout_s, every_s=STORE_BEAT_S, say=say)
        self._observed = {0: range(env.world_size), env.world_size - 1: range(1)}.get(env.rank, ())
        threading.Thread(target=self._poll, daemon=True).start()

    def broadcast(self, failure: Failure) -> None:
        """Broadcasts a failure to all ranks, unless another was broadcast before: later failures
        are its consequences.
        """
        if self._store.add(f"{FAILED}/count", 1) == 1:
            self._store.set(FAILED, to_record(failure))

    def _poll(self) -> None:
        polls = 0
        while True:
            try:
                if self._store.check([FAILED]):
                    failure = parse_record(self._store.get(FAILED))
                    self._on_failure(failure)
                    os._exit(failure.code)
                if polls % (STORE_BEAT_S // POLL_S) == 0:
                    self._store.set(f"{BEAT}/{self._rank}", self._sampler.beat())
                if late := self._heartbeats.check(dict.fromkeys(self._observed, 0)):
                    self.broadcast(late)
            except RuntimeError:  # the store has ended, and with it the job
                return
            polls += 1
            time.sleep(POLL_S)

    def _read(self, rank: int) -> str:
        key = f"{BEAT}/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""


def is_stopped(pid: int) -> bool:
    """Returns True if a signal or a debugger has stopped the process."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False
