"""Which bytes go where, decided once: pure arithmetic over boxes, no torch, no cluster.

    boxes each source rank holds  x  boxes each destination rank keeps  --make_plan-->  rounds of messages

A piece is the part of one HF tensor that a source box and a destination box share. A destination takes a
piece from itself when it holds it, else from the least loaded rank that does. Pieces are cut along dim 0 and
gathered into rounds, so that no rank sends or receives more than `bucket_bytes` in a round; in a round there
is one flat message per (source, destination). Tensors go in the order the engine keeps its layers, so a layer
opened in one round closes soon after.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from megarl.weights.mapping import Box

__all__ = ["Message", "Piece", "Plan", "View", "find_gaps", "intersect", "make_piece", "make_plan"]

Boxes = Sequence[Sequence[Box]]  # [rank] -> what it holds


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
    source: View
    destination: View

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

    def __str__(self) -> str:
        names = sorted({piece.name for piece in self.pieces})
        rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"rank {self.source} -> rank {self.destination}: {', '.join(names[:3])}{rest}"


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

    box: Box
    holders: Mapping[int, Box]


def make_plan(sources: Boxes, destinations: Boxes, *, itemsize: int, bucket_bytes: int) -> Plan:
    """Every element of every destination box exactly once, from whoever holds it.

    Raises ValueError naming the tensor when sources leave a gap or overlap.
    """
    held = _held(sources)
    packer = _Packer(max(1, bucket_bytes // itemsize))
    load: dict[int, int] = defaultdict(int)  # elements each rank sends
    for name, wanted in _wanted(destinations):
        for rank, box in wanted:
            found = 0
            for shared in held.get(name, ()):
                overlap = intersect(shared.box, box)
                if overlap is None:
                    continue
                found += prod(overlap[1])
                source = rank if rank in shared.holders else min(shared.holders, key=lambda r: (load[r], r))
                if source != rank:
                    load[source] += prod(overlap[1])
                for start, shape in _cut(*overlap, packer.limit):
                    packer.add(source, rank, make_piece(name, start, shape, shared.holders[source], box))
            if found != box.numel:
                raise ValueError(
                    f"{name}: rank {rank} keeps {box.numel} elements from {box.start} of shape {box.shape}, "
                    f"the sources hold {found} of them"
                )
    return Plan(packer.rounds(), itemsize)


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
    by_name: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], dict[int, Box]]] = {}
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


def _wanted(destinations: Boxes) -> Iterator[tuple[str, list[tuple[int, Box]]]]:
    """Each tensor with the boxes ranks keep of it, in the order the engines keep their layers."""
    by_name: dict[str, list[tuple[int, Box]]] = {}
    for rank, boxes in enumerate(destinations):
        for box in boxes:
            by_name.setdefault(box.name, []).append((rank, box))
    yield from by_name.items()


def intersect(one: Box, other: Box) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
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


def make_piece(name: str, start: tuple[int, ...], shape: tuple[int, ...], source: Box, destination: Box) -> Piece:
    def view(box: Box) -> View:
        at = sum((s - b) * stride for s, b, stride in zip(start, box.start, box.strides, strict=True))
        return View(box.param, box.offset + at, box.strides)

    return Piece(name, start, shape, view(source), view(destination))


class _Packer:
    """Fills rounds in order; a new one starts when a piece would take what a rank sends or receives over the limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # elements
        self._closed: list[tuple[Message, ...]] = []
        self._open: dict[tuple[int, int], list[Piece]] = {}
        self._filled: dict[tuple[str, int], int] = defaultdict(int)

    def add(self, source: int, destination: int, piece: Piece) -> None:
        ends = (("out", source), ("in", destination))
        if any(self._filled[end] and self._filled[end] + piece.numel > self.limit for end in ends):
            self._close()
        for end in ends:
            self._filled[end] += piece.numel
        self._open.setdefault((source, destination), []).append(piece)

    def _close(self) -> None:
        self._closed.append(tuple(Message(s, d, tuple(pieces)) for (s, d), pieces in sorted(self._open.items())))
        self._open.clear()
        self._filled.clear()

    def rounds(self) -> tuple[tuple[Message, ...], ...]:
        if self._open:
            self._close()
        return tuple(self._closed)
