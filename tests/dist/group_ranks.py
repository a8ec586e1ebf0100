"""Processes of different worlds share a group (test_transports.py): python group_ranks.py STORE RANK WORLD"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.types import CheckFailed
from megarl.weights.sync.transports.collective import (
    Collective,
    end_barrier,
    join_group,
    open_store,
)

TIMEOUT = timedelta(seconds=60)


def join(store: str, rank: int, world: int, name: str) -> Collective:
    return join_group(
        open_store(store, name, TIMEOUT), rank, world, name=name, is_cuda=False, timeout=TIMEOUT
    )


def main(store: str, rank: int, world: int) -> None:
    # each is alone in a default group: there, all are rank 0
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name in ("first", "second"):
        transport = join(store, rank, world, name)
        assert (transport.rank, transport.world, dist.get_rank()) == (rank, world, 0)
        transport.barrier("the test")
        assert transport.gather(rank) == list(range(world))
        assert int(transport.sum(torch.tensor(rank))) == sum(range(world))
        sent, received = torch.full((4,), float(rank)), torch.empty(4)
        transport.start({(rank + 1) % world: sent}, {(rank - 1) % world: received})()
        assert received.eq((rank - 1) % world).all()
        transport.leave()
    transport = join(store, rank, world, "third")
    if rank == 0:  # does not come to the barrier, and says so for another
        end_barrier(store, "third", 1, "engine 7", TIMEOUT)
    else:
        assert "engine 7 of" in refused(lambda: transport.barrier("the sync"))
    a_failure_ends_what_the_others_wait_for(store, rank, world)
    if rank:  # one that is gone before it joins
        assert "engine 8 of" in refused(lambda: join(store, rank, world, "last"))
    else:
        end_barrier(store, "last", 0, "engine 8", TIMEOUT)


def a_failure_ends_what_the_others_wait_for(store: str, rank: int, world: int) -> None:
    """Rank 0 fails; rank 1 waits for its message, rank 2 for rank 1."""
    transport = join(store, rank, world, "fourth")
    transport.sum(torch.tensor(rank))
    began, buffer = time.monotonic(), torch.empty(4)
    if rank == 0:
        transport.leave()
        refused(lambda: transport.sum(torch.tensor(rank)))  # and not in the default group
    else:
        assert f"rank {rank - 1} did not send" in refused(transport.start({}, {rank - 1: buffer}))
    assert time.monotonic() - began < 30, "half of the time-out"
    transport.barrier("the failure of all")  # and not because another has left
    transport.leave()
    assert dist.is_initialized(), "the default group stays"


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except CheckFailed as error:
        return str(error)
    raise AssertionError("it went through")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print("passed", flush=True)
