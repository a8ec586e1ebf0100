"""Broadcasts a rank's failure, so that peers blocked in a collective exit at once instead of waiting for the time-out.

    failing rank --broadcast--> key in the job's store --a polling thread in each rank--> exit with the same code

For multi-node jobs under torchrun. On a single node the launcher waits for its children and ends the others.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megarl.platform.env import Env

KEY = "megarl/failed"
POLL_S = 1.0
CONNECT_S = 60


class FailureWatch:
    """A second connection to torchrun's store: the process group's own connection blocks during collectives.

    Once constructed, it ends this process with a peer's exit code when that peer broadcasts a failure, after calling
    `on_failure(message, code)`.
    """

    def __init__(self, env: Env, on_failure: Callable[[str, int], object]) -> None:
        self._rank, self._on_failure = env.rank, on_failure
        timeout = timedelta(seconds=CONNECT_S)
        address = env.master_addr, env.master_port
        self._store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
        threading.Thread(target=self._poll, daemon=True).start()

    def broadcast(self, message: str, code: int) -> None:
        """Only the first broadcast of a job counts: later failures are its consequences."""
        if self._store.add(f"{KEY}/count", 1) == 1:
            self._store.set(KEY, f"{code} {self._rank} {message}")

    def _poll(self) -> None:
        while True:
            time.sleep(POLL_S)
            try:
                if not self._store.check([KEY]):
                    continue
                code, rank, message = self._store.get(KEY).decode().split(" ", 2)
            except RuntimeError:  # the store is gone, and the job with it
                return
            if int(rank) != self._rank:
                self._on_failure(f"rank {rank} failed: {message}", int(code))
                os._exit(int(code))
