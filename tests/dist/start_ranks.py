"""Starts one process a rank, as torchrun would, and says what the first failing one said."""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

__all__ = ["run_ranks", "start_ranks"]


def environ(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_ranks(program: Path, world: int, *arguments: str) -> list[subprocess.Popen[str]]:
    port, command = free_port(), [sys.executable, str(program), *arguments]
    return [
        subprocess.Popen(
            command,
            env=os.environ | environ(rank, world, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]


def run_ranks(program: Path, world: int, *arguments: str, timeout_s: float = 570) -> None:
    """Wait for all ranks; fails with the output of those that failed.

    They are forked after the program's imports, which would take most of the time of a small program.
    """
    command = [sys.executable, __file__, str(world), str(program), *arguments]
    process = subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=timeout_s)[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert not process.returncode, said


def fork_ranks(world: int, program: str, arguments: list[str]) -> int:
    sys.path.insert(0, str(Path(program).parent))  # before this file's folder
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="imported")
    if "megarl.rollout.vllm.engine" in sys.modules:
        import_vllm()
    port, ranks = free_port(), {}
    for rank in range(world):
        said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read when all have ended)
        if not (pid := os.fork()):
            run_rank(program, environ(rank, world, port), said.fileno())
        ranks[pid] = (rank, said)
    failed = []
    for _ in range(world):
        pid, status = os.wait()
        rank, said = ranks[pid]
        if status:
            said.seek(0)
            failed.append(f"rank {rank}:\n{said.read()[-3000:]}")
    print("\n".join(failed))
    return bool(failed)


def import_vllm() -> None:
    """Once for all ranks, with the variables that megarl's engine sets before it imports vLLM."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for module in ("vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"):
        importlib.import_module(module)


def run_rank(program: str, values: dict[str, str], output: int) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= values
    code = 1
    try:
        runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:  # noqa: BLE001 (reported by the parent)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    raise SystemExit(fork_ranks(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
