"""One rank: die with the launcher, keep noise in a log, run the stage, leave word of how it ended.

    python -m megarl.launch.worker runs/<name>/config.yaml      (started by megarl.launch.spawn)

Rank 0's Python output goes to the terminal; everything else (C++ chatter, other ranks) goes to
runs/<name>/logs/rank_<r>.log.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from megarl.config.load import load_config, run_dir
from megarl.config.schema import Config
from megarl.launch import exit_codes
from megarl.launch.current import CurrentPhase
from megarl.platform.env import Env, set_env

__all__ = ["main", "run_rank"]

PR_SET_PDEATHSIG = 1


def main(config_path: str, command: str = "train") -> int:
    env = Env.read()
    if env.launched:
        _die_with_parent(env.launcher_pid)
    return run_rank(load_config(config_path), env, command)


def run_rank(config: Config, env: Env, command: str = "train") -> int:
    """Run this rank to its end; its exit code. Never raises."""
    folder = run_dir(config)
    terminal = _divert_output(folder / "logs" / f"rank_{env.rank}.log")
    if env.is_main:
        sys.stdout = terminal
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the launcher asks a rank left behind where it is
    # before torch and vLLM are imported: one engine core in this process, and its logging beside our own
    set_env(VLLM_ENABLE_V1_MULTIPROCESSING=0, VLLM_LOGGING_STREAM="ext://sys.stderr", TOKENIZERS_PARALLELISM="false")
    ring: Callable[[str, int], None] = _nobody
    phase = CurrentPhase()
    try:
        from megarl.launch.failure_watch import Alarm

        if env.has_launcher and not env.launched and env.num_nodes > 1:
            alarm = Alarm(env)
            alarm.watch(lambda said, code: _note_exit(folder, env, exit_codes.Failure(-1, code, said, "", time.time())))
            ring = alarm.ring
        _command(config, command)(config, env, phase)
    except KeyboardInterrupt:
        _note_exit(folder, env, exit_codes.Failure(env.rank, exit_codes.STOPPED, "stopped", "", time.time()))
        return exit_codes.STOPPED
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the border: every failure becomes a record and a code)
        traceback.print_exc()
        failure = exit_codes.record_failure(folder, env.rank, error, during=phase.name)
        if _note_exit(folder, env, failure):
            print(f"megarl: rank {env.rank} in {failure.during}: {failure.message}", file=terminal)
        ring(failure.message, failure.code)
        return failure.code
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    if env.rank == 0 and not env.launched:
        exit_codes.write_exit(folder, exit_codes.DONE, world=env.world_size)
    return exit_codes.DONE


def _command(config: Config, command: str) -> Callable[[Config, Env, CurrentPhase], None]:
    """Imports only what the command needs: SFT and `check` run without vLLM."""
    if command == "check":
        from megarl.launch.run_check import run_check

        return run_check
    if command == "train" and config.stage == "sft":
        from megarl.launch.run_sft import run_sft

        return run_sft
    from megarl.launch.run_rl import run_eval, run_rl

    return run_eval if command == "eval" else run_rl


def _nobody(message: str, code: int) -> None:
    """On one node the launcher tells the others."""


def _note_exit(folder: Path, env: Env, failure: exit_codes.Failure) -> bool:
    """Write exit.json where no launcher of ours will, unless a rank was faster; whether this one wrote it."""
    if env.launched or (folder / "exit.json").exists():
        return False
    exit_codes.write_exit(folder, failure.code, failure, world=env.world_size)
    return True


def _die_with_parent(launcher_pid: int) -> None:
    """A launcher killed with -9 cannot end its ranks, so the kernel does (Linux)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:  # it died before the call above
        os._exit(exit_codes.STOPPED)


def _divert_output(log: Path) -> TextIO:
    """Send file descriptors 1 and 2 to `log`; what they were, as a stream."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    terminal = os.fdopen(os.dup(1), "wb", 0)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    return io.TextIOWrapper(terminal, encoding="utf-8", errors="replace", line_buffering=True, write_through=True)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    # C++ destructors of a process group whose peer is gone can hang or abort: the work is done, so leave at once
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
