"""Which bytes go where, decided once: pure arithmetic over boxes, no torch, no cluster.

    boxes each source rank holds  x  boxes each destination rank keeps  --make_plan-->  rounds of messages

A piece is the part of one HF tensor that a source box and a destination box share. A destination takes a
piece from itself when it holds it, else from the least loaded rank of its node that does. What no rank of a node
holds and several keep is sent to one of them, and copied on from the bucket it arrived in a round later: it crosses
the network once. Pieces are cut along dim 0 and gathered into rounds, so that no rank sends or receives more than
`bucket_bytes` in a round; in a round there is one flat message per (source, destination). Tensors go in the order
the engine keeps its layers, so a layer opened in one round closes soon after.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from megarl.models.shards import ShardSlice

__all__ = ["Message", "Piece", "Plan", "View", "arrived", "find_gaps", "intersect", "make_piece", "make_plan"]

Boxes = Sequence[Sequence[ShardSlice]]  # [rank] -> what it holds


@dataclass(frozen=True, slots=True)
class View:
    """Where a piece lies in a rank's memory: `param` seen with `strides` from `offset`, in elements."""

    param: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """[start, start + shape) of HF tensor `name`, where it is and where it goes."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    source: View  # of a parameter; of a piece copied on: of the bucket of the round before, param is `arrived(from)`
    destination: View
    is_relay: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Message:
    """One flat buffer of one round: its pieces end to end, in order. `source == destination`: nothing travels."""

    source: int
    destination: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)

    @property
    def is_relay(self) -> bool:
        """Some of it must have arrived before it can be packed."""
        return any(piece.is_relay for piece in self.pieces)

    def __str__(self) -> str:
        names = sorted({piece.name for piece in self.pieces})
        rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
        how = " (copied on)" if self.is_relay else ""
        return f"rank {self.source} -> rank {self.destination}{how}: {', '.join(names[:3])}{rest}"


@dataclass(frozen=True)
class Plan:
    """All rounds of one sync, the same on every rank."""

    rounds: tuple[tuple[Message, ...], ...]
    itemsize: int  # bytes of an element

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        return tuple(message for round_ in self.rounds for message in round_)

    @property
    def bytes_kept(self) -> int:
        return self.itemsize * sum(message.numel for message in self.messages)

    @property
    def bytes_received(self) -> int:
        """What crosses a border between ranks; a rank receives only what it keeps."""
        return self.itemsize * sum(m.numel for m in self.messages if m.source != m.destination)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over every message in order; ranks compare theirs before the first byte moves."""
        digest = hashlib.sha256(str(self.itemsize).encode())
        for number, round_ in enumerate(self.rounds):
            for message in round_:
                digest.update(f"{number} {message!r}".encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Shared:
    """One rectangle of a tensor and the ranks that hold it, each with its own box."""

    box: ShardSlice
    holders: Mapping[int, ShardSlice]


def make_plan(
    sources: Boxes, destinations: Boxes, *, itemsize: int, bucket_bytes: int, ranks_per_node: int | None = None
) -> Plan:
    """Every element of every destination box exactly once, from whoever holds it.

    `ranks_per_node`: ranks of a node, numbered node by node; None: all are on one, and nothing is copied on.
    Raises ValueError naming the tensor when sources leave a gap or overlap.
    """
    held = _held(sources)
    dealer = _Dealer(_Packer(max(1, bucket_bytes // itemsize)), ranks_per_node or max(len(sources), len(destinations)))
    for name, wanted in _wanted(destinations):
        found = [0] * len(wanted)
        for shared in held.get(name, ()):
            # (start, shape, node) -> those of `wanted` that keep it; replicas and repeated heads keep the same region
            regions: dict[tuple[tuple[int, ...], tuple[int, ...], int], list[tuple[int, ShardSlice]]] = {}
            for index, (rank, box) in enumerate(wanted):
                overlap = intersect(shared.box, box)
                if overlap is not None:
                    found[index] += prod(overlap[1])
                    regions.setdefault((*overlap, dealer.node(rank)), []).append((rank, box))
            for (start, shape, node), keepers in regions.items():
                dealer.deal(shared, start, shape, node, keepers)
        for (rank, box), numel in zip(wanted, found, strict=True):
            if numel != box.numel:
                raise ValueError(
                    f"{name}: rank {rank} keeps {box.numel} elements from {box.start} of shape {box.shape}, "
                    f"the sources hold {numel} of them"
                )
    return Plan(dealer.packer.rounds(), itemsize)


def arrived(source: int) -> str:
    """The `View.param` that stands for the bucket which came from `source` a round before."""
    return f"arrived from rank {source}"


def find_gaps(expected: Mapping[str, tuple[int, ...]], boxes: Boxes) -> list[str]:
    """What `boxes` of all these ranks together lack of the expected tensors, or hold beyond them; [] when complete."""
    held, gaps = _held(boxes), []
    for name, shape in expected.items():
        found = sum(shared.box.numel for shared in held.get(name, ()))
        if found != prod(shape):
            gaps.append(f"{name} ({found} of {prod(shape)} elements)" if found else f"{name} (absent)")
    gaps += [f"{name} (not a tensor of this model)" for name in held if name not in expected]
    return gaps


def _held(sources: Boxes) -> dict[str, list[_Shared]]:
    """Each tensor's distinct rectangles; replicas of one rectangle are holders of it."""
    by_name: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], dict[int, ShardSlice]]] = {}
    for rank, boxes in enumerate(sources):
        for box in boxes:
            holders = by_name.setdefault(box.name, {}).setdefault((box.start, box.shape), {})
            holders.setdefault(rank, box)
    held = {}
    for name, rectangles in by_name.items():
        shared = [_Shared(next(iter(holders.values())), holders) for holders in rectangles.values()]
        for i, one in enumerate(shared):
            for other in shared[i + 1 :]:
                if intersect(one.box, other.box) is not None:
                    raise ValueError(
                        f"{name}: two source rectangles overlap, {one.box.start}+{one.box.shape} "
                        f"and {other.box.start}+{other.box.shape}"
                    )
        held[name] = shared
    return held


def _wanted(destinations: Boxes) -> Iterator[tuple[str, list[tuple[int, ShardSlice]]]]:
    """Each tensor with the boxes ranks keep of it, in the order the engines keep their layers, all ranks at a time."""
    by_name: dict[str, list[tuple[int, ShardSlice]]] = {}
    place: dict[str, int] = {}
    for rank, boxes in enumerate(destinations):
        for number, box in enumerate(boxes):
            by_name.setdefault(box.name, []).append((rank, box))
            place[box.name] = min(number, place.get(box.name, number))
    yield from sorted(by_name.items(), key=lambda item: place[item[0]])


def intersect(one: ShardSlice, other: ShardSlice) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(start, shape) of what both hold."""
    start = tuple(map(max, one.start, other.start))
    shape = tuple(
        min(a + n, b + m) - s
        for a, n, b, m, s in zip(one.start, one.shape, other.start, other.shape, start, strict=True)
    )
    return None if any(size <= 0 for size in shape) else (start, shape)


def _cut(
    start: tuple[int, ...], shape: tuple[int, ...], limit: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Slices along dim 0 of at most `limit` elements; a single row may be more."""
    rows = max(1, limit // max(1, prod(shape[1:])))
    for first in range(0, shape[0], rows):
        yield (start[0] + first, *start[1:]), (min(rows, shape[0] - first), *shape[1:])


def make_piece(
    name: str, start: tuple[int, ...], shape: tuple[int, ...], source: ShardSlice, destination: ShardSlice
) -> Piece:
    def view(box: ShardSlice) -> View:
        at = sum((s - b) * stride for s, b, stride in zip(start, box.start, box.strides, strict=True))
        return View(box.param, box.offset + at, box.strides)

    return Piece(name, start, shape, view(source), view(destination))


class _Dealer:
    """Says who sends a region to whom, the least busy first."""

    def __init__(self, packer: _Packer, ranks_per_node: int) -> None:
        self.packer = packer
        self._node_ranks = ranks_per_node
        self._sent: dict[int, int] = defaultdict(int)  # elements each rank sends of its own
        self._taken: dict[int, int] = defaultdict(int)  # elements each rank gets from who holds them

    def node(self, rank: int) -> int:
        return rank // self._node_ranks

    def deal(
        self,
        shared: _Shared,
        start: tuple[int, ...],
        shape: tuple[int, ...],
        node: int,
        keepers: Sequence[tuple[int, ShardSlice]],  # on that node
    ) -> None:
        near = [rank for rank in shared.holders if self.node(rank) == node]
        foreign = {rank: box for rank, box in keepers if rank not in shared.holders}
        onward: dict[int, ShardSlice] = {}
        if not near and len(foreign) > 1:
            first = min(foreign, key=lambda rank: (self._taken[rank], rank))
            onward = {rank: box for rank, box in foreign.items() if rank != first}
        for rank, box in keepers:
            if onward.get(rank) is box:
                continue
            source = rank
            if rank in foreign:
                source = min(near or shared.holders, key=lambda rank: (self._sent[rank], rank))
                self._sent[source] += prod(shape)
                self._taken[rank] += prod(shape)
            copies = onward if foreign.get(rank) is box else {}
            for at, size in _cut(start, shape, self.packer.limit // max(1, len(copies))):
                piece = make_piece(shared.box.name, at, size, shared.holders[source], box)
                views = {other: make_piece(shared.box.name, at, size, kept, kept) for other, kept in copies.items()}
                self.packer.add(source, rank, piece, {other: copy.destination for other, copy in views.items()})


class _Packer:
    """Fills rounds in order; a new one starts when a piece would take what a rank sends or receives over the limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # elements
        self._round = 0
        self._messages: dict[tuple[int, int, int], list[Piece]] = defaultdict(list)  # (round, source, destination)
        self._filled: dict[tuple[int, str, int], int] = defaultdict(int)  # (round, way, rank) -> elements

    def add(self, source: int, destination: int, piece: Piece, onward: Mapping[int, View]) -> None:
        """`onward`: ranks that `destination` copies the piece on to, in the round after."""
        numel = piece.numel
        loads = [(0, "out", source, numel), (0, "in", destination, numel)]
        loads += [(1, "in", rank, numel) for rank in onward]
        loads += [(1, "out", destination, numel * len(onward))] if onward else []
        while any(0 < self._filled[self._round + d, way, r] > self.limit - n for d, way, r, n in loads):
            self._round += 1
        now = self._round
        message = self._messages[now, source, destination]
        if onward:
            strides = tuple(prod(piece.shape[axis + 1 :]) for axis in range(len(piece.shape)))
            lies = View(arrived(source), sum(earlier.numel for earlier in message), strides)
            for rank, view in onward.items():
                copy = replace(piece, source=lies, destination=view, is_relay=True)
                self._messages[now + 1, destination, rank].append(copy)
        message.append(piece)
        for later, way, rank, load in loads:
            self._filled[now + later, way, rank] += load

    def rounds(self) -> tuple[tuple[Message, ...], ...]:
        found: list[list[Message]] = [[] for _ in range(1 + max((now for now, *_ in self._messages), default=-1))]
        for (now, source, destination), pieces in sorted(self._messages.items(), key=lambda item: item[0]):
            found[now].append(Message(source, destination, tuple(pieces)))
        return tuple(map(tuple, found))
