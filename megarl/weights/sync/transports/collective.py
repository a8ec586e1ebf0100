"""Point-to-point messages between the ranks of torch.distributed's world, or of a process group
across worlds: NCCL on GPUs, gloo on CPUs.

Errors name the rank that is gone or stuck: before a sync, the ranks missing at the store's barrier;
during a sync, the peer of the transfer that did not complete. A collective alone would only report
a time-out."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from megarl.types import CheckFailed
from megarl.weights.sync.transports import Transport
from megarl.weights.sync.transports.values import gather_values

X = TypeVar("X")
BARRIER = "megarl/barrier"
DIAGNOSIS_S = 10.0  # how long the survivors of a failed collective wait for each other
_INSTANCES = count()  # every rank creates the same number of instances, in the same order


def open_store(address: str, name: str, timeout: timedelta) -> Any:
    """Returns the store at "file:PATH" or "HOST:PORT", with the prefix `name` for its keys, for
    processes that share no launcher."""
    kind, _, where = address.partition(":")
    private: Any = dist  # __all__ does not list the stores
    if kind == "file":
        store = private.FileStore(where, -1)
    else:
        store = private.TCPStore(kind, int(where), is_master=False, timeout=timeout)
    store.set_timeout(timeout)
    return dist.distributed_c10d.PrefixStore(name, store)


@dataclass
class Barriers:
    """Barriers of ranks that share a store; they need no other connection. All ranks call `meet`
    for the same barriers, in the same order."""

    store: Any
    rank: int
    world: int
    _numbers: Iterator[int] = field(default_factory=count)

    def meet(self, what: str, timeout: timedelta) -> None:
        """Waits for all ranks. Raises CheckFailed naming the ranks that do not arrive in time."""
        number = str(next(self._numbers))
        # set once, by the last rank to arrive or the first to time out; final
        verdict = f"{number}/verdict"
        self.store.set(f"{number}/{self.rank}", "here")
        if self.store.add(f"{number}/count", 1) == self.world:
            self.store.compare_set(verdict, "", "all")
        try:
            self.store.wait([verdict], timeout)
        except dist.DistNetworkError as error:
            raise CheckFailed(
                f"rank 0, which hosts the store, exited before {what}: {error}"
            ) from error
        except RuntimeError:  # the time-out: DistError for TCPStore, RuntimeError for FileStore
            missing = [
                rank for rank in range(self.world) if not self.store.check([f"{number}/{rank}"])
            ]
            plural = "s" * (len(missing) > 1)
            self.store.compare_set(verdict, "", f"rank{plural} {', '.join(map(str, missing[:16]))}")
        absent = self.store.get(verdict).decode()
        if absent != "all":
            raise CheckFailed(
                f"{absent} of {self.world} did not reach {what} within "
                f"{timeout.total_seconds():g} s; check that log, and raise launch.timeout_s if it "
                "is only slow"
            )


def end_barrier(
    address: str,
    name: str,
    number: int,
    absent: str,
    timeout: timedelta,
) -> None:
    """Ends barrier `number` of the group whose store is at `address`, under `name`, so that its
    error names the `absent` ranks. Barrier 0 is the one in join_group."""
    store = dist.distributed_c10d.PrefixStore(BARRIER, open_store(address, name, timeout))
    store.compare_set(f"{number}/verdict", "", absent)


class Collective(Transport):
    """A Transport over a process group: the default group, or one created by `join_group`."""

    def __init__(
        self,
        *,
        timeout_s: float | None = None,  # None: torch's default
        group: Any = None,
        barriers: Barriers | None = None,
    ) -> None:
        self._timeout = default_pg_timeout
        if timeout_s:
            self._timeout = timedelta(seconds=timeout_s)
        if barriers is None:
            # the store that the ranks used for rendezvous
            store = dist.distributed_c10d._get_default_store()
            store = dist.distributed_c10d.PrefixStore(f"{BARRIER}/{next(_INSTANCES)}", store)
            barriers = Barriers(store, dist.get_rank(), dist.get_world_size())
        self.rank = barriers.rank
        self.world = barriers.world
        self._barriers = barriers
        self._joined = group
        self._is_default = group is None

    @property
    def _group(self) -> Any:
        if self._joined is None and not self._is_default:
            raise CheckFailed("the process group of the weight sync has ended; join another")
        return self._joined

    def leave(self) -> None:
        """Closes the connections, so that operations of waiting peers fail. Does nothing for the
        default group, or if they are already closed."""
        # gloo keeps connections until the last reference
        process_group = self._joined
        self._joined = None
        if process_group is not None:
            with suppress(RuntimeError, ValueError):
                dist.destroy_process_group(process_group)

    def start(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        operations = []
        faults = []
        transfers = [(dist.isend, "accept", *item) for item in sorted(outgoing.items())]
        transfers += [(dist.irecv, "send", *item) for item in sorted(incoming.items())]
        for kind, fault, peer, flat in transfers:
            # as bytes, so that gloo and NCCL need not support the dtype
            data = flat.view(torch.uint8)
            operations.append(dist.P2POp(kind, data, group=self._group, group_peer=peer))
            faults.append(f"rank {peer} did not {fault} {flat.nbytes} bytes of weights")
        works = []
        text = ""
        try:
            if operations:
                works += dist.batch_isend_irecv(operations)
        except RuntimeError as error:  # gloo may detect a lost peer here already
            text = str(error)
        operations.clear()  # they reference the group
        if text:
            raise self._lost(" or ".join(faults), text)
        if len(works) < len(faults):  # NCCL returns one work for all operations
            faults = [" or ".join(faults)]

        def wait() -> None:
            while works:  # once each: a second wait on a gloo transfer never returns
                fault = faults.pop()
                try:
                    works.pop().wait(self._timeout)
                    continue
                except RuntimeError as error:
                    text = str(error)  # not the error: its frames reference the group
                works.clear()
                raise self._lost(fault, text)

        return wait

    def _lost(self, fault: str, text: str) -> CheckFailed:
        self.leave()  # so that peers fail as well, at once
        return CheckFailed(
            f"{fault} (waited up to {self._timeout.total_seconds():g} s): {text}; check that "
            "rank's log, and raise launch.timeout_s if it is only slow"
        )

    def barrier(
        self,
        what: str,
        timeout: timedelta | None = None,
        *,
        patience: int = 1,
    ) -> None:
        self._barriers.meet(what, timeout or self._timeout * patience)

    def sum(self, values: Tensor) -> Tensor:
        total = values.clone()
        self._run(lambda: dist.all_reduce(total, group=self._group))
        return total

    def gather(self, value: Any) -> list[Any]:
        return self._run(lambda: gather_values(value, self._group))

    def _run(self, collective: Callable[[], X]) -> X:
        """Runs a collective. If it fails, raises CheckFailed naming the missing ranks, which a
        barrier among the remaining ranks finds."""
        try:
            return collective()
        except CheckFailed:
            raise
        except RuntimeError as error:
            text = " ".join(str(error).split())
        self.leave()
        timeout = min(self._timeout, timedelta(seconds=DIAGNOSIS_S))
        self.barrier(f"the end of a weight sync ({text})", timeout)
        raise CheckFailed(f"a weight sync failed although all ranks are still running: {text}")


def join_group(
    store: Any,
    rank: int,
    world: int,
    *,
    name: str,
    is_cuda: bool,
    timeout: timedelta,
) -> Collective:
    """A collective. Creates a process group of `world` members across worlds. The members' default
    groups differ, so `rank` is not dist.get_rank(). After a member dies, the others join again
    under another `name`. Raises CheckFailed if a member does not arrive in time."""
    barriers = Barriers(dist.distributed_c10d.PrefixStore(BARRIER, store), rank, world)
    # connecting to a member that is gone would block until the time-out
    barriers.meet("the weight sync's process group", timeout)
    backend = dist.Backend("cpu:gloo,cuda:nccl" if is_cuda else "gloo")
    helper: Any = dist.distributed_c10d._new_process_group_helper
    group, _ = helper(
        world,
        rank,
        [],
        backend,
        store,
        group_name=name,
        timeout=timeout,
    )
    dist.distributed_c10d._world.pg_group_ranks[group] = {number: number for number in range(world)}
    return Collective(timeout_s=timeout.total_seconds(), group=group, barriers=barriers)
