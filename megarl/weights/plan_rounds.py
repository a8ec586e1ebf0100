"""In which round each transfer runs: every sender and receiver as busy as it can be, none above `round_numel`.

    hops in order of position --assign_rounds--> round of each hop (its relays follow one round later)

List scheduling, a round at a time: of the hops that are due, those whose ranks have room, in order; what has none
waits. A hop is due about when its receiver would get to it if all rounds were full, so that layers are not opened
long before they are complete. What a rank keeps of its own goes with what else arrives of the layer.
"""

from __future__ import annotations

import numpy as np

from megarl.weights.senders import Hops, Ints

__all__ = ["assign_rounds"]

AHEAD = 2  # rounds by which a hop may run early
MAX_PASSES = 16  # over the hops that are due, in one round
# what a rank has room for in a round: over the network and in all, what stays on the rank, and the next round's relays
FAR_OUT, FAR_IN, OUT, IN, STAYS, NEXT_OUT, NEXT_IN, KINDS = range(8)


def assign_rounds(hops: Hops, numel: Ints, *, world: int, ranks_per_node: int, round_numel: int) -> Ints:
    """[hops]; `numel` [hops]. A hop of more than `round_numel` has a round of its ranks for itself."""
    rounds = np.zeros(len(numel), dtype=np.int32)
    loads = _Loads(hops, numel, world, ranks_per_node)
    capacity = loads.capacity(round_numel)
    total = loads.total()
    num_rounds = int(np.ceil(total / capacity[:, None]).max(initial=1))
    due = hops.position * num_rounds // hops.total
    moved = hops.sender != hops.receiver
    travelling, staying = np.flatnonzero(moved), np.flatnonzero(~moved)
    _schedule(travelling, np.maximum(due[travelling] - AHEAD, 0), loads, capacity, rounds)
    if len(staying):
        ends = int(rounds.max(initial=0)) + 1
        first = np.full((int(hops.layer.max()) + 2, world), ends, dtype=np.int32)
        np.minimum.at(first, (hops.layer[travelling] + 1, hops.receiver[travelling]), rounds[travelling])
        first = first[hops.layer[staying] + 1, hops.receiver[staying]]
        later = np.where(first < ends, first, due[staying] * ends // num_rounds)
        order = np.argsort(later, kind="stable")
        _schedule(staying[order], later[order], loads, capacity, rounds)
    return rounds


class _Loads:
    """What hops take of their ranks' room. A resource is a kind of room of one rank."""

    def __init__(self, hops: Hops, numel: Ints, world: int, ranks_per_node: int) -> None:
        self._hops, self._numel, self.world = hops, numel, world
        self._is_far = hops.sender // ranks_per_node != hops.receiver // ranks_per_node
        self._relays = np.searchsorted(hops.relay_hop, np.arange(len(numel) + 1))

    def entries(self, chosen: Ints) -> tuple[Ints, Ints, Ints]:
        """(place in `chosen`, resource, elements) of all the room that hops take, ascending in place by resource."""
        hops, world, numel = self._hops, self.world, self._numel[chosen]
        sender, receiver = hops.sender[chosen], hops.receiver[chosen]
        moved = np.flatnonzero(sender != receiver)
        far, stays = np.flatnonzero(self._is_far[chosen]), np.flatnonzero(sender == receiver)
        first, last = self._relays[chosen], self._relays[chosen + 1]
        copies = last - first
        relaying = np.flatnonzero(copies)
        each = np.repeat(relaying, copies[relaying])
        within = np.arange(len(each)) - np.repeat(np.cumsum(copies[relaying]) - copies[relaying], copies[relaying])
        relays = hops.relay_receiver[first[each] + within]
        parts = (
            (FAR_OUT, far, sender[far], numel[far]),
            (FAR_IN, far, receiver[far], numel[far]),
            (OUT, moved, sender[moved], numel[moved]),
            (IN, moved, receiver[moved], numel[moved]),
            (STAYS, stays, receiver[stays], numel[stays]),
            (NEXT_OUT, relaying, receiver[relaying], (numel * copies)[relaying]),
            (NEXT_IN, each, relays, numel[each]),
        )
        resource = np.concatenate([(kind * world + ranks).astype(np.int32) for kind, _, ranks, _ in parts])
        return np.concatenate([part[1] for part in parts]), resource, np.concatenate([part[3] for part in parts])

    def total(self) -> Ints:
        """[kinds, world] elements of all hops; relays are counted as what a rank sends and receives."""
        total = np.zeros(KINDS * self.world, dtype=np.int64)
        for first in range(0, len(self._numel), 1 << 20):
            _, resource, numel = self.entries(np.arange(first, min(first + (1 << 20), len(self._numel))))
            total += np.bincount(resource, weights=numel, minlength=len(total)).astype(np.int64)
        total = total.reshape(KINDS, self.world)
        total[OUT] += total[NEXT_OUT]
        total[IN] += total[NEXT_IN]
        return total

    def capacity(self, round_numel: int) -> Ints:
        """[kinds] elements of a round. Where much moves within nodes the network has a share of it: so that both
        are in use in each round."""
        total = self.total()
        far, both = int(total[:2].max()), int(total[2:4].max())
        capacity = np.full(KINDS, round_numel, dtype=np.int64)
        if 0 < far < both:
            capacity[[FAR_OUT, FAR_IN]] = max(1, min(round_numel // 2, round_numel * far // both))
        return capacity


def _schedule(hops: Ints, due: Ints, loads: _Loads, capacity: Ints, rounds: Ints) -> None:
    """Write the rounds of `hops`, which are ascending in `due` and in order of preference."""
    full = np.repeat(capacity, loads.world)
    room, now, taken = full.copy(), 0, 0
    waiting = np.zeros(0, dtype=np.int64)
    shift = np.arange(2 * loads.world) + NEXT_OUT * loads.world  # to OUT and IN
    while taken < len(hops) or len(waiting):
        upto = int(np.searchsorted(due, now, side="right"))
        waiting = np.concatenate([waiting, hops[taken:upto]])
        taken = upto
        accepted = _fill(waiting, loads, room, full)
        rounds[waiting[accepted]] = now
        waiting = waiting[~accepted]
        now += 1
        used = full[shift] - room[shift]
        room[:] = full
        room[shift - (NEXT_OUT - OUT) * loads.world] -= used


def _fill(waiting: Ints, loads: _Loads, room: Ints, full: Ints) -> np.ndarray:
    """[waiting] which of them run now; takes what they need from `room` [resources]."""
    accepted = np.zeros(len(waiting), dtype=bool)
    place, resource, numel = loads.entries(waiting)
    order = np.lexsort((place, resource))
    place, resource, numel = place[order], resource[order], numel[order]
    able = np.ones(len(waiting), dtype=bool)
    for _ in range(MAX_PASSES):
        # what does not fit even alone waits; the rest, in order, up to the room there is
        able[place[(numel > room[resource]) & (room[resource] < full[resource])]] = False
        kept = able[place]
        place, resource, numel = place[kept], resource[kept], numel[kept]
        if not len(place):
            break
        starts = np.flatnonzero(np.diff(resource, prepend=-1))
        sums = np.cumsum(numel)
        before = sums - numel
        before -= np.repeat(before[starts], np.diff(starts, append=len(sums)))
        fits = able.copy()
        fits[place[(before + numel > room[resource]) & (before > 0)]] = False
        chosen = fits[place]
        room -= np.bincount(resource[chosen], weights=numel[chosen], minlength=len(room)).astype(np.int64)
        accepted |= fits
        able &= ~fits
        kept = ~chosen
        place, resource, numel = place[kept], resource[kept], numel[kept]
    return accepted
