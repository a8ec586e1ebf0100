"""One rank's failure, told to all: a rank that waits in a collective for a dead peer would wait for its time-out.

    rank fails --ring--> key in the job's store --every second, a thread in each rank--> message, exit with that code

For jobs of several nodes under torchrun: on one node the launcher sees its children end and ends the others.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megarl.platform.env import Env

__all__ = ["Alarm"]

KEY = "megarl/failed"
POLL_S = 1.0


class Alarm:
    """A connection of its own to the store that torchrun made: the collectives' one blocks while it waits."""

    def __init__(self, env: Env) -> None:
        self._rank = env.rank
        self._store = TCPStore(
            env.master_addr, env.master_port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
        )

    def watch(self, heard: Callable[[str, int], object]) -> None:
        """From now on end this process with a peer's code when that peer rings; `heard` gets (what it said, code)."""
        threading.Thread(target=self._watch, args=(heard,), daemon=True).start()

    def ring(self, message: str, code: int) -> None:
        """The first rank to ring is the cause; later ones are its echo and change nothing."""
        if self._store.add(f"{KEY}/count", 1) == 1:
            self._store.set(KEY, f"{code} {self._rank} {message}")

    def _watch(self, heard: Callable[[str, int], object]) -> None:
        while True:
            time.sleep(POLL_S)
            try:
                rung = self._store.check([KEY])
                said = self._store.get(KEY).decode() if rung else ""
            except RuntimeError:  # the store is gone, and the job with it
                return
            if not rung:
                continue
            code, rank, message = said.split(" ", 2)
            if int(rank) != self._rank:
                heard(f"rank {rank} failed: {message}", int(code))
                os._exit(int(code))
