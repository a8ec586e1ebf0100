"""Ends a job under torchrun: a rank's failure, or a rank that is late, is broadcast, and every rank
exits at once.

    each rank: beat and State --every BEAT_S--> key in the job's store --> rank 0: Heartbeats.check
    failing rank, or rank 0 for one that is stuck --broadcast--> key --a thread a rank--> exits

The last rank observes rank 0. A stopped rank cannot exit: torchrun kills it when another rank of
its node has exited, and `srun --kill-on-bad-exit` where it was alone.
"""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megarl.platform.env import Env, get_env
from megarl.processes.exit_codes import CurrentPhase, Failure, parse_record, to_record
from megarl.processes.heartbeat import Heartbeats
from megarl.processes.late_ranks import StackSampler

KEY = "megarl/failed"
BEAT = "megarl/beat"
POLL_S = 1.0
BEAT_S = 5.0
CONNECT_S = 60
Call = Callable[..., object]


class FailureWatch:
    """Ends this process with the code of a failure that is broadcast, after `on_failure(failure)`.

    It has a connection of its own to the job's store: that of the process group blocks during
    collectives.
    """

    def __init__(
        self, env: Env, phase: CurrentPhase, timeout_s: float, on_failure: Call, say: Call
    ) -> None:
        self._sampler = StackSampler(phase)
        self._on_failure = on_failure
        self._rank = env.rank
        # without torchrun's agent, rank 0 serves the store, here and then for the process group
        serves = env.is_main and get_env("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._store = TCPStore(
            env.master_addr,
            env.master_port,
            is_master=serves,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_S),
            multi_tenant=True,
        )
        self._heartbeats = Heartbeats(self._read, timeout_s, every_s=BEAT_S, say=say)
        self._observed = {0: range(env.world_size), env.world_size - 1: range(1)}.get(env.rank, ())
        threading.Thread(target=self._poll, daemon=True).start()

    def broadcast(self, failure: Failure) -> None:
        """Only the first broadcast of a job counts: later failures are its consequences."""
        if self._store.add(f"{KEY}/count", 1) == 1:
            self._store.set(KEY, to_record(failure))

    def _poll(self) -> None:
        polls = 0
        while True:
            try:
                if self._store.check([KEY]):
                    failure = parse_record(self._store.get(KEY))
                    self._on_failure(failure)
                    os._exit(failure.code)
                if polls % (BEAT_S // POLL_S) == 0:
                    self._store.set(f"{BEAT}/{self._rank}", self._sampler.beat())
                if late := self._heartbeats.check(dict.fromkeys(self._observed, 0)):
                    self.broadcast(late)
            except RuntimeError:  # the store is gone, and the job with it
                return
            polls += 1
            time.sleep(POLL_S)

    def _read(self, rank: int) -> str:
        key = f"{BEAT}/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""
