"""Starts the ranks of a job on this machine and waits for them. Does not import torch.

    spawn_ranks --Popen, torchrun's variables--> W x megarl.run.rank_process
                <-- exit statuses, beats, failure records --
    Then: ends the other ranks, unlinks shared memory, reports the first failure, writes exit.json

Ranks are plain child processes, not workers of torch's elastic agent. This keeps their exit codes,
avoids importing torch, and responds to Ctrl-C at once. Under torchrun, nothing is spawned: every
process is a rank (rank_process.run_external).
"""

import fcntl
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.config.run_dir import prepare_run_dir
from megarl.config.schema import Config
from megarl.config.validate import Job
from megarl.platform.env import child_env, get_env
from megarl.processes.exit_codes import (
    DEFECT,
    DONE,
    REFUSED,
    STOPPED,
    TERMINATED,
    USER,
    Failure,
    first_failure,
    parse_record,
    say,
    write_exit,
)
from megarl.processes.heartbeat import Heartbeats, RankState, Slots
from megarl.processes.shared_memory import lock_shm, shm_prefix, unlink_dead, unlink_shm

GRACE_S = 3.0  # time for peers of a failed rank to record failures, which may show the cause
POLL_S = 0.05


def spawn_ranks(config: Config, job: Job, command: str) -> int:
    """Runs `command` on `job.world` local ranks; returns the exit code of the job."""
    folder = config.run_dir
    with lock_run_dir(folder):
        file = prepare_run_dir(config, command)
        started = time.time()
        unlink_dead()
        job_id = secrets.token_hex(4)
        shm = shm_prefix(job_id, os.getpid())
        lock_shm(shm)
        ranks = _Ranks(folder, config.launch.timeout_s)
        try:
            with _stop_signals() as signals:
                ranks.start(job.world, job_id=job_id, arguments=[str(file), command])
                failure = ranks.wait(signals)
        finally:
            ranks.end()
            unlink_shm(shm, lock=True)
        return report_end(folder, failure, started, job.world, ranks.left_running)


@contextmanager
def lock_run_dir(folder: Path) -> Iterator[None]:
    """Locks the run directory against a second run of the same name.

    The kernel releases the lock even if the run is killed. Raises ValueError if it is in use.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise ValueError(
                f"{folder / '.lock'} cannot be locked ({error.strerror}); remove it, or set run.dir"
            ) from None
        stack.callback(os.close, file)
        # also locks the folder, because the file could be removed during the run
        directory = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, directory)
        for handle in (file, directory):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(file, 20, 0).decode(errors="replace").strip() or "?"
                raise ValueError(
                    f"{folder} is in use by another run (pid {pid}); choose another run.name"
                ) from None
            except OSError:
                if handle == file:
                    raise  # not for the folder: NFS can only lock files
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        yield


@contextmanager
def _stop_signals() -> Iterator[set[int]]:
    """Yields a set that collects the signals SIGINT, SIGTERM and SIGHUP as they arrive."""
    signals = set()
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {name: signal.signal(name, lambda number, _frame: signals.add(number)) for name in names}
    try:
        yield signals
    finally:
        for name, handler in old.items():
            signal.signal(name, handler)


@dataclass
class _Ranks:
    """The child processes of a job."""

    folder: Path
    timeout_s: float
    slots: Slots = field(default_factory=lambda: Slots(os.memfd_create("megarl-slots")))
    processes: list[subprocess.Popen[Any]] = field(default_factory=list)
    # a line per rank that was still running after a failure, with its state
    left_running: list[str] = field(default_factory=list)
    is_saving: bool = False  # SIGTERM has been passed on

    def start(self, world: int, *, job_id: str, arguments: list[str]) -> None:
        cores = len(os.sched_getaffinity(0))
        store_fd = os.memfd_create("megarl-store")
        for rank in range(world):
            environ = child_env(
                RANK=rank,
                LOCAL_RANK=rank,
                WORLD_SIZE=world,
                LOCAL_WORLD_SIZE=world,
                OMP_NUM_THREADS=get_env("OMP_NUM_THREADS") or max(1, cores // world),
                MEGARL_JOB_ID=job_id,
                MEGARL_LAUNCHED=os.getpid(),
                MEGARL_STORE_FD=store_fd,
                MEGARL_SLOTS_FD=self.slots.fd,
            )
            args = [sys.executable, "-m", "megarl.run.rank_process", *arguments]
            with (self.folder / "logs" / f"rank_{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    args,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else log,
                    stderr=log,
                    pass_fds=(store_fd, self.slots.fd),
                    # Ctrl-C then reaches only the launcher, and `killpg` reaches grandchildren
                    start_new_session=True,
                )
            self.processes.append(process)
        os.close(store_fd)

    def wait(self, signals: set[int]) -> Failure | None:
        """Waits until a rank fails or stops responding, the user stops the job, or all ranks are
        done. Returns the failure, or None if all are done.
        """
        heartbeats = Heartbeats(self.slots.read, self.timeout_s)
        while not signals or (signals == {signal.SIGTERM} and self._save(heartbeats.states)):
            codes = [process.poll() for process in self.processes]
            if all(code == 0 for code in codes):
                return None
            if any(codes):
                return self._cause(signals, heartbeats)
            if late := heartbeats.check(self._running()):
                return late
            time.sleep(POLL_S)
        return Failure(-1, TERMINATED if signals == {signal.SIGTERM} else STOPPED, "stopped")

    def _running(self) -> dict[int, int]:
        """Returns {rank: process id} of the running ranks."""
        return {
            rank: process.pid
            for rank, process in enumerate(self.processes)
            if process.poll() is None
        }

    def _save(self, states: Mapping[int, RankState]) -> bool:
        """Passes SIGTERM on to the ranks, so that they save and end, after all have left start-up.

        Returns True if it has been passed on.
        """
        num_started = sum(state.phase != "start-up" for state in states.values())
        if not self.is_saving and num_started == len(self.processes):
            self.is_saving = True
            say("SIGTERM: the run ends when it is saved; Ctrl-C ends it at once")
            for process in self.processes:
                process.send_signal(signal.SIGTERM)
        return self.is_saving

    def _cause(self, signals: set[int], heartbeats: Heartbeats) -> Failure:
        """Gives the other ranks time to fail too, then returns the first failure, or that of the
        late rank that caused it.
        """
        rank, status = next((i, p.returncode) for i, p in enumerate(self.processes) if p.poll())
        deadline = time.monotonic() + GRACE_S
        while self._running() and not signals and time.monotonic() < deadline:
            heartbeats.check(self._running())
            time.sleep(POLL_S)
        self.left_running = [
            f"still running: rank {rank} ({heartbeats.states.get(rank, '?')})"
            for rank in self._running()
        ]
        if status < 0:  # the rank was killed: failures that peers recorded are consequences
            name = (
                signal.strsignal(-status)
                if -status not in set(signal.Signals)
                else signal.Signals(-status).name
            )
            hint = (
                "; out of memory? use fewer ranks or a smaller model" if name == "SIGKILL" else ""
            )
            return Failure(rank, DEFECT, f"rank {rank} was killed by {name}{hint}")
        records = filter(None, map(self.slots.failure, range(len(self.processes))))
        if failure := first_failure(map(parse_record, records)):
            late = heartbeats.suspect
            if late and failure.code == DEFECT and failure.rank != late.rank:
                return late
            return failure
        code = status if status in (USER, REFUSED) else DEFECT
        return Failure(
            rank, code, f"rank {rank} exited with status {status} without recording a failure"
        )

    def end(self) -> None:
        """Kills all ranks and the processes that they started; all saving is done before."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


def report_end(
    folder: Path,
    failure: Failure | None,
    started: float,
    world: int,
    left_running: Sequence[str] = (),
) -> int:
    """Prints the failure, if any, and writes exit.json; returns the exit code."""
    code = DONE
    if failure:
        code = failure.code
        say(_message_of(failure, folder, left_running))
    write_exit(folder, code, failure, seconds=round(time.time() - started, 1), world=world)
    return code


def _message_of(failure: Failure, folder: Path, left_running: Sequence[str]) -> str:
    if failure.code in (STOPPED, TERMINATED):
        return f"{failure.message}; results so far are in {folder}"
    if failure.code == USER:
        return failure.message
    if failure.code == REFUSED:
        return f"refused to continue ({failure.phase}): {failure.message}"
    phase = f" in {failure.phase}" if failure.phase else ""
    who = f"rank {failure.rank}"
    log = f"full log: {folder}/logs/rank_{failure.rank}.log"
    if failure.rank < 0:
        who = "the launcher"
        log = f"logs: {folder}/logs"
    message = f"{who} failed{phase}: {failure.message}"
    return "\n".join(filter(None, [message, failure.traceback.rstrip(), log, *left_running]))
