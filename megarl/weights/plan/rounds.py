"""Assigns transfers to rounds, keeping every sender and receiver as busy as possible within `round_numel`.

    hops in order of position --assign_rounds--> round of each hop (its relays follow one round later)

List scheduling, one round at a time: of the hops that are due, those whose ranks have capacity left run, in order;
the rest wait. A hop is due when its receiver would reach it if all rounds were full. Receivers look at most one
round ahead, so that layers are not opened long before they are complete. A rank's local copies of a layer run with the
transfers of that layer.
"""

from __future__ import annotations

import numpy as np

from megarl.weights.placements import Ints, Placement
from megarl.weights.senders import Hops

MAX_PASSES = 16  # over the hops that are due, in one round
# kinds of capacity that a rank has in a round: network, all links, local copies, and the relays of the next round
FAR_OUT, FAR_IN, OUT, IN, STAYS, NEXT_OUT, NEXT_IN, KINDS = range(8)


def assign_rounds(hops: Hops, numel: Ints, placement: Placement, *, round_numel: int) -> Ints:
    """Returns the round of each hop. `numel`: elements of each; a hop above `round_numel` has its ranks to itself."""
    world = placement.world
    scheduler = _Scheduler(hops, numel, world, placement.ranks_per_node, round_numel)
    due = hops.position * scheduler.num_rounds // placement.total
    moved = hops.sender != hops.receiver
    travelling, staying = np.flatnonzero(moved), np.flatnonzero(~moved)
    scheduler.run(travelling, due[travelling])
    if len(staying):
        rounds = scheduler.rounds
        end = int(rounds.max()) + 1
        opened = np.full((int(hops.layer.max()) + 2, world), end, dtype=np.int32)
        np.minimum.at(
            opened, (hops.layer[travelling] + 1, hops.receiver[travelling]), rounds[travelling]
        )
        begin = opened[hops.layer[staying] + 1, hops.receiver[staying]]
        begin = np.where(begin < end, begin, due[staying] * end // scheduler.num_rounds)
        order = np.argsort(begin, kind="stable")
        scheduler.run(staying[order], begin[order])
    return scheduler.rounds


class _Scheduler:
    """Assigns rounds to hops. A resource is one kind of capacity of one rank."""

    def __init__(
        self, hops: Hops, numel: Ints, world: int, ranks_per_node: int, round_numel: int
    ) -> None:
        self.rounds = np.zeros(len(numel), dtype=np.int32)
        self._hops, self._numel, self._world, self._round_numel = hops, numel, world, round_numel
        self._is_far = hops.sender // ranks_per_node != hops.receiver // ranks_per_node
        self._copies = np.bincount(hops.relay_hop, minlength=len(numel)).astype(np.int32)
        self._first_copy = np.cumsum(self._copies) - self._copies
        total = self._total()
        far, both = int(total[: OUT * world].max()), int(total[OUT * world :].max())
        capacity = np.full(KINDS, round_numel, dtype=np.int64)
        if (
            0 < far < both
        ):  # the network gets a share of each round, so that links within nodes are busy too
            capacity[[FAR_OUT, FAR_IN]] = max(1, min(round_numel // 2, round_numel * far // both))
        self._full = np.repeat(capacity, world)
        self.num_rounds = int(
            np.ceil(total / self._full[: len(total)]).max(initial=1)
        )  # a lower bound

    def _total(self) -> Ints:
        """Elements of all hops and relays, by resource up to STAYS."""
        world, total = self._world, np.zeros(KINDS * self._world, dtype=np.int64)
        for first in range(0, len(self._numel), 1 << 20):
            _, resource, numel = self._entries(
                np.arange(first, min(first + (1 << 20), len(self._numel)))
            )
            total += np.bincount(resource, weights=numel, minlength=len(total)).astype(np.int64)
        total[OUT * world : STAYS * world] += total[NEXT_OUT * world :]
        return total[: NEXT_OUT * world]

    def _entries(self, chosen: Ints) -> tuple[Ints, Ints, Ints]:
        """(position in `chosen`, resource, elements) of all capacity that hops use; ascending for each resource."""
        hops, numel = self._hops, self._numel[chosen]
        sender, receiver = hops.sender[chosen], hops.receiver[chosen]
        far, moved = np.flatnonzero(self._is_far[chosen]), np.flatnonzero(sender != receiver)
        stays, copies = np.flatnonzero(sender == receiver), self._copies[chosen]
        relaying = np.flatnonzero(copies)
        each = np.repeat(relaying, copies[relaying])
        number = np.arange(len(each)) - np.repeat(
            np.cumsum(copies[relaying]) - copies[relaying], copies[relaying]
        )
        relay_receiver = hops.relay_receiver[self._first_copy[chosen[each]] + number]
        entries = (
            (FAR_OUT, far, sender[far], numel[far]),
            (FAR_IN, far, receiver[far], numel[far]),
            (OUT, moved, sender[moved], numel[moved]),
            (IN, moved, receiver[moved], numel[moved]),
            (STAYS, stays, receiver[stays], numel[stays]),
            (NEXT_OUT, relaying, receiver[relaying], (numel * copies)[relaying]),
            (NEXT_IN, each, relay_receiver, numel[each]),
        )
        kinds, places, ranks, sizes = zip(*entries, strict=True)
        resource = [kind * self._world + rank for kind, rank in zip(kinds, ranks, strict=True)]
        return np.concatenate(places), np.concatenate(resource), np.concatenate(sizes)

    def run(self, hops: Ints, due: Ints) -> None:
        """Sets the rounds of `hops`, which are sorted by `due`."""
        room, number, taken = self._full.copy(), 0, 0
        now, following = (
            slice(kind * self._world, (kind + 2) * self._world) for kind in (OUT, NEXT_OUT)
        )
        waiting = np.zeros(0, dtype=np.int64)
        while taken < len(hops) or len(waiting):
            upto = int(np.searchsorted(due, number, side="right"))
            waiting, taken = np.concatenate([waiting, hops[taken:upto]]), upto
            before = _before(self._hops.receiver[waiting], self._numel[waiting])
            near = np.flatnonzero(before <= self._round_numel)
            accepted = np.zeros(len(waiting), dtype=bool)
            accepted[near] = self._fill(waiting[near], room)
            self.rounds[waiting[accepted]] = number
            waiting = waiting[~accepted]
            relayed = self._full[following] - room[following]
            room[:] = self._full
            room[now] -= relayed
            number += 1

    def _fill(self, waiting: Ints, room: Ints) -> np.ndarray:
        """Returns which of `waiting` run in this round; subtracts their capacity from `room` [resources]."""
        accepted, able = np.zeros(len(waiting), dtype=bool), np.ones(len(waiting), dtype=bool)
        place, resource, numel = self._entries(waiting)
        for _ in range(MAX_PASSES):
            # a hop that does not fit alone waits; the others run in order, up to the remaining capacity
            able[place[(numel > room[resource]) & (room[resource] < self._full[resource])]] = False
            remaining = able[place]
            place, resource, numel = place[remaining], resource[remaining], numel[remaining]
            if not len(place):
                break
            before = _before(resource, numel)
            fits = able.copy()
            fits[place[(before + numel > room[resource]) & (before > 0)]] = False
            chosen = fits[place]
            room -= np.bincount(
                resource[chosen], weights=numel[chosen], minlength=len(room)
            ).astype(np.int64)
            accepted |= fits
            able &= ~fits
        return accepted


def _before(key: Ints, numel: Ints) -> Ints:
    """The sum of `numel` over all earlier entries of the same key."""
    order = np.argsort(
        key.astype(np.uint16) if key.max(initial=0) < 1 << 16 else key, kind="stable"
    )  # a radix sort
    size, key = numel[order], key[order]
    before = np.cumsum(size) - size
    first = np.flatnonzero(np.diff(key, prepend=-1))
    result = np.empty_like(before)
    result[order] = before - np.repeat(before[first], np.diff(first, append=len(key)))
    return result
