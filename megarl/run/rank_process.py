"""The process of one rank: redirects output to a log, runs the command, records the exit code.

    python -m megarl.run.rank_process runs/<name>/config.yaml COMMAND

The process is started by megarl.processes.spawn or by an external launcher (`run_external`).
Rank 0's Python output goes to the terminal. All other output (C++ libraries, other ranks) goes to
runs/<name>/logs/rank_<r>.log.
"""

import faulthandler
import io
import os
import signal
import sys
import traceback
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TextIO

from megarl.config.load import load_config
from megarl.config.run_dir import prepare_run_dir
from megarl.config.schema import Config
from megarl.config.stages import program
from megarl.jail.jailed import die_with
from megarl.platform.env import (
    LOOPBACK,
    Env,
    clean_logs,
    compute_capability,
    get_env,
    log_text,
    set_env,
)
from megarl.processes.exit_codes import (
    DONE,
    STOPPED,
    CurrentPhase,
    Failure,
    failure_of,
    leave,
    to_record,
    write_exit,
)
from megarl.processes.heartbeat import FailureWatch, Slots

BLACKWELL = (10, 0)  # compute capability


def main(config_path: str, command: str = "train") -> int:
    env = Env.read()
    if env.launched:
        die_with(env.launcher_pid)
    return run_rank(load_config(config_path), env, command)


def run_external(config: Config, env: Env, command: str) -> int:
    """Runs a rank that an external launcher (torchrun, Slurm) started; returns its exit code."""
    if env.is_main:
        prepare_run_dir(config, command)
    return run_rank(config, env, command)


def run_rank(config: Config, env: Env, command: str) -> int:
    """Runs `command` (train, or one of RANK_COMMANDS) on this rank; returns its exit code.

    An exception of the command is logged, recorded, and turned into an exit code.
    """
    folder = config.run_dir
    terminal = redirect_output(folder / "logs" / f"rank_{env.rank}.log")
    if env.is_main:
        sys.stdout = terminal
    faulthandler.enable()
    clean_logs()
    _set_variables(env)
    set_env(**trainer_variables(config))
    say = partial(print, "megarl:", file=terminal)
    note_exit = partial(_note_exit, folder, env)
    watch = None
    phase = CurrentPhase()
    slots = Slots(env.slots_fd)
    if command == "train":
        signal.signal(signal.SIGTERM, lambda _number, _frame: setattr(phase, "is_stopping", True))
    if env.launched:
        slots.start_beating(env.rank, phase)
    try:
        if env.has_launcher and not env.launched and env.world_size > 1:
            watch = FailureWatch(env, phase, config.launch.timeout_s, note_exit, say)
        _run(config, env, phase, command)
    except KeyboardInterrupt:
        note_exit(Failure(env.rank, STOPPED, "stopped"))
        return STOPPED
    except BaseException as error:  # noqa: BLE001 (every failure becomes a record and an exit code)
        failure = failure_of(error, env.rank, phase=phase.name, run_dir=folder)
        if env.launched:
            slots.write_failure(env.rank, to_record(failure))
        with suppress(OSError):  # for example if the log's disk is full
            print(log_text(traceback.format_exc()), file=sys.stderr)
        if note_exit(failure):
            say(f"rank {env.rank} ended in {failure.phase}: {failure.message}")
        if watch is not None:
            watch.broadcast(failure)
        return failure.code
    if env.is_main and not env.launched:
        write_exit(folder, DONE, world=env.world_size)
    return DONE


def _set_variables(env: Env) -> None:
    set_env(
        # read when vLLM is imported: run the engine core in this process, log to our stderr
        VLLM_ENABLE_V1_MULTIPROCESSING=0,
        VLLM_LOGGING_STREAM="ext://sys.stderr",
        TOKENIZERS_PARALLELISM="false",
        # entries of torch's flight recorder of collectives
        TORCH_FR_BUFFER_SIZE=get_env("TORCH_FR_BUFFER_SIZE", "256"),
    )
    if env.world_size == env.local_world_size:
        set_env(**LOOPBACK)


def trainer_variables(config: Config) -> dict[str, str | None]:
    """Returns the variables of a process that trains, to be set before it uses a GPU.

    With tensor or context parallelism on GPUs before Blackwell, Megatron's overlap of communication
    and computation needs kernels to run in the order of their launch (Megatron-LM 0.19,
    training/arguments.py). CUDA reads the variable once per process, so a colocated engine gets it
    too. A value that the user has set stays.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    parallel = config.parallel
    if max(parallel.tensor, parallel.context) == 1 or compute_capability() >= BLACKWELL:
        return {}
    return {name: get_env(name, "1")}


def _run(config: Config, env: Env, phase: CurrentPhase, command: str) -> None:
    """Imports and runs the stage or command; imported only here, so that SFT runs without vLLM."""
    module, _, function = program(config.stage, command).entry.partition(":")
    run = getattr(import_module(module), function)
    from megarl.run.context import open_rank

    with open_rank(config, env, phase) as rank:
        run(rank)


def _note_exit(folder: Path, env: Env, failure: Failure) -> bool:
    """Writes exit.json, unless megarl's launcher will or another rank already has; returns True if
    written.
    """
    if env.launched or (folder / "exit.json").exists():
        return False
    write_exit(folder, failure.code, failure, world=env.world_size)
    return True


def redirect_output(log: Path) -> TextIO:
    """Redirects file descriptors 1 and 2 to `log`; returns a stream to the original stdout."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    terminal = os.fdopen(os.dup(1), "wb", 0)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    return io.TextIOWrapper(
        terminal, encoding="utf-8", errors="replace", line_buffering=True, write_through=True
    )


if __name__ == "__main__":
    leave(main(*sys.argv[1:]))
