"""A config becomes W processes on this machine, watched to their end. No torch in this process.

    launch --Popen, torchrun's variables--> W x megarl.launch.worker --> exit statuses, failure records
       <---- the first failure, said once; peers ended; shared memory unlinked; runs/<name>/exit.json ----

Inside torchrun (a cluster) the ranks exist already and this process is one of them. Ranks are plain child
processes rather than torch's elastic agent: real exit codes, no torch to import, Ctrl-C answered at once.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from megarl.config.load import resolved_yaml, run_dir
from megarl.config.schema import Config
from megarl.config.validate import Job
from megarl.launch import exit_codes, worker
from megarl.launch.exit_codes import Failure
from megarl.platform.env import Env, child_env, get_env
from megarl.platform.shm import shm_prefix, unlink_dead, unlink_shm

__all__ = ["launch"]

GRACE_S = 3.0  # for peers of a failed rank to fail by themselves, so that their records say why
KILL_AFTER_S = 4.0  # from a polite end to a kill
ANSWER_S = 1.0  # for a rank left behind to write where it is
POLL_S = 0.05


def launch(config: Config, env: Env, job: Job, *, command: str = "train") -> int:
    """Run `config` on `job.world` ranks; the exit code of the job."""
    folder = run_dir(config)
    if env.has_launcher:
        if env.rank == 0:
            _prepare(folder, config)
        return worker.run_rank(config, env, command)
    with _only_run(folder):
        _prepare(folder, config)
        started = time.time()
        unlink_dead()
        job_id = secrets.token_hex(4)
        ranks = _Ranks(folder)
        try:
            with _stop_signals() as stopped:
                ranks.start(job.world, job_id=job_id, command=command)
                failure = ranks.wait(stopped)
        finally:
            ranks.end()
            unlink_shm(shm_prefix(job_id, os.getpid()))
        code = failure.code if failure else exit_codes.DONE
        exit_codes.write_exit(folder, code, failure, seconds=round(time.time() - started, 1), world=job.world)
        if failure:
            print(_message(failure, folder, ranks.left_running), file=sys.stderr, flush=True)
        return code


def _prepare(folder: Path, config: Config) -> None:
    exit_codes.clear_failures(folder)
    (folder / "config.yaml").write_text(resolved_yaml(config), encoding="utf-8")


@contextmanager
def _only_run(folder: Path) -> Iterator[None]:
    """Two runs of one name would write over each other; the kernel frees the lock however a run ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            pid = lock.read().strip() or "?"
            raise ValueError(f"{folder} belongs to a run that is going on (pid {pid}); give run.name another") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C (or a polite kill) arrived since."""
    arrived: list[int] = []
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {name: signal.signal(name, lambda number, _frame: arrived.append(number)) for name in names}
    try:
        yield lambda: bool(arrived)
    finally:
        for name, handler in old.items():
            signal.signal(name, handler)


@dataclass
class _Ranks:
    """The children, from start to end."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    left_running: list[int] = field(default_factory=list)  # ranks that had not failed when the job was ended

    def start(self, world: int, *, job_id: str, command: str) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        port = _free_port()
        for rank in range(world):
            environ = child_env(
                RANK=rank,
                LOCAL_RANK=rank,
                WORLD_SIZE=world,
                LOCAL_WORLD_SIZE=world,
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                OMP_NUM_THREADS=get_env("OMP_NUM_THREADS") or max(1, cores // world),
                MEGARL_JOB_ID=job_id,
                MEGARL_RUN_DIR=str(self.folder.resolve()),
                MEGARL_LAUNCHED=os.getpid(),
            )
            args = [sys.executable, "-m", "megarl.launch.worker", str(self.folder / "config.yaml"), command]
            with (self.folder / "logs" / f"rank_{rank}.log").open("wb") as log:
                # a session of its own: the terminal's Ctrl-C reaches the launcher alone, and a kill the whole family
                self.processes.append(
                    subprocess.Popen(
                        args,
                        env=environ,
                        stdin=subprocess.DEVNULL,
                        stdout=None if rank == 0 else log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    def wait(self, stopped: Callable[[], bool]) -> Failure | None:
        """Until all ranks are done (None), or one failed, or the user stopped the job."""
        while not stopped():
            codes = [process.poll() for process in self.processes]
            if all(code == 0 for code in codes):
                return None
            if any(codes):
                return self._cause(stopped)
            time.sleep(POLL_S)
        return Failure(-1, exit_codes.STOPPED, "stopped", "", time.time())

    def _cause(self, stopped: Callable[[], bool]) -> Failure:
        """Give peers a moment to fail too, then find who was first."""
        first = {rank: p.returncode for rank, p in enumerate(self.processes) if p.poll()}
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and not stopped() and any(p.poll() is None for p in self.processes):
            time.sleep(POLL_S)
        self.left_running = [rank for rank, process in enumerate(self.processes) if process.poll() is None]
        self._ask_where()
        rank, status = next(iter(first.items()))
        if status < 0:  # killed from outside: the peers' records are only echoes of it
            name = signal.Signals(-status).name
            hint = "; out of memory? use fewer or smaller ranks" if name == "SIGKILL" else ""
            return Failure(rank, exit_codes.DEFECT, f"rank {rank} was ended by {name}{hint}", "", time.time())
        if found := exit_codes.first_failure(self.folder):
            return found
        text = f"rank {rank} ended with status {status} and left no word"
        return Failure(
            rank,
            status if status in (exit_codes.USER, exit_codes.REFUSED) else exit_codes.DEFECT,
            text,
            "",
            time.time(),
        )

    def _ask_where(self) -> None:
        """Have ranks that still run write where they are to their logs (faulthandler), before they are ended."""
        logs = [self.folder / "logs" / f"rank_{rank}.log" for rank in self.left_running]
        sizes = [log.stat().st_size for log in logs]
        for rank in self.left_running:
            self.processes[rank].send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline and any(
            log.stat().st_size == size for log, size in zip(logs, sizes, strict=True)
        ):
            time.sleep(POLL_S)

    def end(self) -> None:
        """No child of ours, or child of theirs, outlives this."""
        for process in self.processes:
            _signal_family(process, signal.SIGTERM)
        deadline = time.monotonic() + KILL_AFTER_S
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            _signal_family(process, signal.SIGKILL)
            process.wait()


def _signal_family(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _message(failure: Failure, folder: Path, left_running: list[int]) -> str:
    """What the user sees of a failed job, once."""
    if failure.code == exit_codes.STOPPED:
        return f"megarl: stopped; what was done is in {folder}"
    if failure.code == exit_codes.USER:
        return f"megarl: {failure.message}"
    if failure.code == exit_codes.REFUSED:
        return f"megarl: refused to go on ({failure.during}): {failure.message}"
    log = folder / "logs" / f"rank_{failure.rank}.log"
    during = f" in {failure.during}" if failure.during else ""
    lines = [
        f"megarl: rank {failure.rank} failed{during}: {failure.message}",
        failure.tail.rstrip(),
        f"whole log: {log}",
    ]
    if left_running:
        ranks = ", ".join(map(str, left_running))
        lines.append(f"rank {ranks} had not failed; the end of its log shows what it was waiting for")
    return "\n".join(line for line in lines if line)
