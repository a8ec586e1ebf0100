"""Assigns transfers to rounds, keeping every sender and receiver as busy as possible within
`round_numel`.

    hops in order of position --assign_rounds--> round of each hop; its relays run one round later

Uses list scheduling, one round at a time: due hops run in order while their ranks have capacity
left; the rest wait. A hop is due when its receiver would reach it if all rounds were full.
Receivers look at most one round ahead, so that layers are not opened long before they are complete.
A rank's local copies of a layer run with the transfers of that layer."""

import numpy as np

from megarl.weights.plan.senders import Hops
from megarl.weights.plan.tables import Ints, Placement, sums_at

MAX_PASSES = 16  # passes over the due hops in one round
HOPS_AT_ONCE = 1 << 20
# kinds of capacity that a rank has in a round: network, all links, local copies, and the relays of
# the next round
FAR_OUT, FAR_IN, OUT, IN, STAYS, NEXT_OUT, NEXT_IN, KINDS = range(8)


def assign_rounds(
    hops: Hops,
    numel: Ints,
    placement: Placement,
    *,
    round_numel: int,
) -> Ints:
    """Returns the round of each hop. `numel` [hops]: elements of each hop. A hop larger than
    `round_numel` has the links of its ranks to itself."""
    scheduler = _Scheduler(hops, numel, placement, round_numel)
    due = hops.position * scheduler.num_rounds // placement.total
    moved = hops.sender != hops.receiver
    travelling = np.flatnonzero(moved)
    staying = np.flatnonzero(~moved)
    scheduler.run(travelling, due[travelling])
    if len(staying):
        rounds = scheduler.rounds
        end = int(rounds.max()) + 1
        layer = hops.layer + 1
        opened = np.full((int(layer.max()) + 1, placement.world), end, dtype=np.int32)
        ends = (layer[travelling], hops.receiver[travelling])
        np.minimum.at(opened, ends, rounds[travelling])
        begin = opened[layer[staying], hops.receiver[staying]]
        usual = due[staying] * end // scheduler.num_rounds
        begin = np.where(begin < end, begin, usual)
        order = np.argsort(begin, kind="stable")
        scheduler.run(staying[order], begin[order])
    return scheduler.rounds


class _Scheduler:
    """Assigns rounds to hops. A resource is one kind of capacity of one rank."""

    def __init__(
        self,
        hops: Hops,
        numel: Ints,
        placement: Placement,
        round_numel: int,
    ) -> None:
        world = placement.world
        per_node = placement.ranks_per_node
        self.rounds = np.zeros(len(numel), dtype=np.int32)
        self._hops = hops
        self._numel = numel
        self._world = world
        self._round_numel = round_numel
        self._is_far = hops.sender // per_node != hops.receiver // per_node
        self._copies = np.bincount(hops.relay_hop, minlength=len(numel)).astype(np.int32)
        self._first_copy = np.cumsum(self._copies) - self._copies
        total = self._total()
        far = int(total[: OUT * world].max())
        both = int(total[OUT * world :].max())
        capacity = np.full(KINDS, round_numel, dtype=np.int64)
        # the network gets a share of each round, so that links within nodes are busy too
        if 0 < far < both:
            capacity[[FAR_OUT, FAR_IN]] = max(1, min(round_numel // 2, round_numel * far // both))
        self._full = np.repeat(capacity, world)
        full_rounds = np.ceil(total / self._full[: len(total)])
        self.num_rounds = int(full_rounds.max(initial=1))  # a lower bound

    def _total(self) -> Ints:
        """Returns the elements of all hops and relays, by resource up to STAYS."""
        world = self._world
        count = len(self._numel)
        total = np.zeros(KINDS * world, dtype=np.int64)
        for first in range(0, count, HOPS_AT_ONCE):
            hops = np.arange(first, min(first + HOPS_AT_ONCE, count))
            _, resource, numel = self._entries(hops)
            total += sums_at(resource, numel, len(total))
        total[OUT * world : STAYS * world] += total[NEXT_OUT * world :]
        return total[: NEXT_OUT * world]

    def _entries(self, chosen: Ints) -> tuple[Ints, Ints, Ints]:
        """Returns (position in `chosen`, resource, elements) for all capacity that the hops use.
        Positions ascend within each resource."""
        hops = self._hops
        numel = self._numel[chosen]
        sender = hops.sender[chosen]
        receiver = hops.receiver[chosen]
        far = np.flatnonzero(self._is_far[chosen])
        moved = np.flatnonzero(sender != receiver)
        stays = np.flatnonzero(sender == receiver)
        copies = self._copies[chosen]
        relaying = np.flatnonzero(copies)
        counts = copies[relaying]
        each = np.repeat(relaying, counts)
        before = np.cumsum(counts) - counts
        number = np.arange(len(each)) - np.repeat(before, counts)
        relay_receiver = hops.relay_receiver[self._first_copy[chosen[each]] + number]
        entries = (
            (FAR_OUT, far, sender[far], numel[far]),
            (FAR_IN, far, receiver[far], numel[far]),
            (OUT, moved, sender[moved], numel[moved]),
            (IN, moved, receiver[moved], numel[moved]),
            (STAYS, stays, receiver[stays], numel[stays]),
            (NEXT_OUT, relaying, receiver[relaying], numel[relaying] * counts),
            (NEXT_IN, each, relay_receiver, numel[each]),
        )
        kinds, places, ranks, sizes = zip(*entries, strict=True)
        resource = [kind * self._world + rank for kind, rank in zip(kinds, ranks, strict=True)]
        return np.concatenate(places), np.concatenate(resource), np.concatenate(sizes)

    def run(self, hops: Ints, due: Ints) -> None:
        """Sets the rounds of `hops`, which are sorted by `due`."""
        room = self._full.copy()
        number = 0
        taken = 0
        now = slice(OUT * self._world, (OUT + 2) * self._world)
        following = slice(NEXT_OUT * self._world, (NEXT_OUT + 2) * self._world)
        waiting = np.zeros(0, dtype=np.int64)
        while taken < len(hops) or len(waiting):
            upto = int(np.searchsorted(due, number, side="right"))
            waiting = np.concatenate([waiting, hops[taken:upto]])
            taken = upto
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
        """Returns a mask of the `waiting` hops that run in this round, and subtracts the capacity
        that they use from `room` [resources]."""
        accepted = np.zeros(len(waiting), dtype=bool)
        able = np.ones(len(waiting), dtype=bool)
        place, resource, numel = self._entries(waiting)
        for _ in range(MAX_PASSES):
            # a hop that does not fit even alone waits; all others run in order, up to the remaining
            # capacity
            left = room[resource]
            is_over = (numel > left) & (left < self._full[resource])
            able[place[is_over]] = False
            remaining = able[place]
            place = place[remaining]
            resource = resource[remaining]
            numel = numel[remaining]
            if not len(place):
                break
            before = _before(resource, numel)
            fits = able.copy()
            is_over = (before + numel > room[resource]) & (before > 0)
            fits[place[is_over]] = False
            chosen = fits[place]
            room -= sums_at(resource[chosen], numel[chosen], len(room))
            accepted |= fits
            able &= ~fits
        return accepted


def _before(key: Ints, numel: Ints) -> Ints:
    """Returns, for each entry, the sum of `numel` over all earlier entries with the same key."""
    narrow = key
    if key.max(initial=0) < 1 << 16:
        narrow = key.astype(np.uint16)  # numpy sorts 16-bit keys with a radix sort
    order = np.argsort(narrow, kind="stable")
    size = numel[order]
    key = key[order]
    before = np.cumsum(size) - size
    first = np.flatnonzero(np.diff(key, prepend=-1))
    result = np.empty_like(before)
    result[order] = before - np.repeat(before[first], np.diff(first, append=len(key)))
    return result
