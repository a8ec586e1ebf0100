"""Starts one process a rank, as torchrun would, and says what the first failing one said."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

__all__ = ["run_ranks", "start_ranks"]


def start_ranks(program: Path, world: int, *arguments: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(world):
        env = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, str(program), *arguments]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    return processes


def run_ranks(program: Path, world: int, *arguments: str, timeout_s: float = 570) -> None:
    """Wait for all ranks; fails with the output of those that failed."""
    processes = start_ranks(program, world, *arguments)
    try:
        said = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [f"rank {rank}:\n{text[-3000:]}" for rank, text in enumerate(said) if processes[rank].returncode]
    assert not failed, "\n".join(failed)
