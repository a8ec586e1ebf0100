"""Processes of different worlds share a group (test_transports.py): python group_ranks.py STORE RANK WORLD"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.types import CheckFailed
from megarl.weights.transports.collective import Collective, Group, end_barrier, open_store

TIMEOUT = timedelta(seconds=60)


def join(store: str, rank: int, world: int, name: str) -> Collective:
    group = Group.join(open_store(store, name, TIMEOUT), rank, world, name=name, is_cuda=False, timeout=TIMEOUT)
    return Collective(timeout_s=60, group=group)


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
        end_barrier(store, "third", 0, "engine 7", TIMEOUT)
        return
    try:
        transport.barrier("the sync")
    except CheckFailed as error:
        assert "engine 7 of" in str(error), error
        return
    raise AssertionError("the barrier let it through")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print("passed", flush=True)
