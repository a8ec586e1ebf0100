"""Buckets between ranks of one torch.distributed world, point to point: NCCL on GPUs, gloo on CPUs.

A rank that is gone or stuck is named, twice: before a sync by a roll call through the store, and within one by the
peer of the transfer that did not end. Collectives would only say that time ran out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.types import CheckFailed

__all__ = ["Collective"]

TIMEOUT_S = 600.0
CAUSE_S = 10.0  # how long survivors of a collective that failed look for each other
_MADE = count()  # transports of this process: every rank makes as many, in the same order


class Collective:
    """`group=None`: the whole world, whose ranks the plan counts."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._timeout = timedelta(seconds=timeout_s)
        self._calls = count()
        store: Any = dist.distributed_c10d._get_default_store()  # the one that the ranks met in
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)  # pyright: ignore[reportArgumentType]
        self._store = dist.distributed_c10d.PrefixStore(f"megarl/roll call/{next(_MADE)}/{ranks[0]}-{ranks[-1]}", store)

    def start(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Callable[[], None]:
        transfers = [(f"rank {peer} did not take", dist.isend, flat, peer) for peer, flat in sorted(outgoing.items())]
        transfers += [(f"rank {peer} did not send", dist.irecv, flat, peer) for peer, flat in sorted(incoming.items())]
        operations = [self._operation(kind, flat, peer) for _, kind, flat, peer in transfers]
        works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
        said = [f"{text} {flat.nbytes} bytes of weights" for text, _, flat, _ in transfers]
        if len(works) < len(said):  # NCCL ends them all as one
            said = [" or ".join(said)]

        def wait() -> None:
            while works:  # once each: a second wait on a gloo transfer never returns
                text = said.pop()
                try:
                    works.pop().wait(self._timeout)
                except RuntimeError as error:
                    works.clear()
                    seconds = self._timeout.total_seconds()
                    raise CheckFailed(
                        f"{text} (waited at most {seconds:g} s): {error}; look at that rank's log, and "
                        "raise launch.timeout_s if it is only slow"
                    ) from error

        return wait

    def _operation(self, kind: Callable[..., Any], flat: Tensor, peer: int) -> dist.P2POp:
        # as bytes: gloo and NCCL then need not know the dtype
        return dist.P2POp(kind, flat.view(torch.uint8), group=self._group, group_peer=peer)

    def barrier(self, what: str) -> None:
        self._roll_call(what, self._timeout)

    def _roll_call(self, what: str, timeout: timedelta) -> None:
        call = str(next(self._calls))
        verdict = f"{call}/verdict"  # set once, by the last to come or the first to give up: all ranks obey it
        self._store.set(f"{call}/{self.rank}", "here")
        if self._store.add(f"{call}/count", 1) == self.world:
            self._store.compare_set(verdict, "", "all")
        try:
            self._store.wait([verdict], timeout)
        except dist.DistNetworkError as error:
            raise CheckFailed(f"rank 0, in whose store ranks meet, is gone before {what}: {error}") from error
        except dist.DistError:
            missing = [rank for rank in range(self.world) if not self._store.check([f"{call}/{rank}"])]
            self._store.compare_set(verdict, "", f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:16]))}")
        said = self._store.get(verdict).decode()
        if said != "all":
            raise CheckFailed(
                f"{said} of {self.world} did not come to {what} within {timeout.total_seconds():g} s; look at "
                "that log, and raise launch.timeout_s if it is only slow"
            )

    def sum(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Tensor, how: Any) -> Tensor:
        total = values.clone()
        self._together(lambda: dist.all_reduce(total, how, group=self._group))
        return total

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        self._together(lambda: dist.all_gather_object(found, value, group=self._group))
        return found

    def _together(self, collective: Callable[[], object]) -> None:
        """A collective that fails says nothing of ranks: those who are left then call each other."""
        try:
            collective()
        except RuntimeError as error:
            what = f"the end of a sync of weights ({' '.join(str(error).split())})"
            self._roll_call(what, min(self._timeout, timedelta(seconds=CAUSE_S)))
            raise CheckFailed(f"a sync of weights failed between ranks that are all there: {error}") from error
