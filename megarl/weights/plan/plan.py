"""The plan of a weight sync: which bytes go from which rank to which, in which round. No torch, no communication.

    tables and a fleet | every rank's slices --> transfer groups --> senders --> rounds --> Plan --lower--> Messages

All ranks compute the same Plan as arrays over messages; each lowers its own messages to transfers. In a round there is
at most one flat message for each (sender, receiver), and no rank sends or receives more than `round_bytes`, unless a
single row of a tensor is larger. A rank may be a sender, a receiver or both.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

import numpy as np

from megarl.models.engine import engine_table
from megarl.models.formats import BlockFormat
from megarl.models.fp8 import with_scales
from megarl.models.registry import megatron_table
from megarl.models.shape import ModelShape
from megarl.models.shards import ElementSizes, LayerSpec, ShardSlice, whole_tensor
from megarl.weights.fleet import Fleet
from megarl.weights.placements import FleetTables, Ints, Placement, RecordedSlices, SlicesByRank
from megarl.weights.plan_rounds import assign_rounds
from megarl.weights.senders import Hops, assign_senders

GROUPS_PER_ROUND = 16  # the largest groups fill 1/16 of a round


@dataclass(frozen=True, slots=True)
class Transfer:
    """A rectangle of an HF tensor, where the sender reads it and where the receiver writes it. One that is relayed is
    read from the message that arrived in the previous round: the source's `param` is `relay_buffer` of its sender."""

    source: ShardSlice
    destination: ShardSlice
    is_relay: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One flat buffer: its transfers end to end, each in row-major order. `sender == receiver`: a local copy."""

    index: int  # among all messages of the plan
    round: int
    sender: int
    receiver: int
    transfers: tuple[Transfer, ...]

    @property
    def numel(self) -> int:
        return sum(transfer.source.numel for transfer in self.transfers)

    @property
    def is_relay(self) -> bool:
        """Whether part of it arrives at the sender in the previous round."""
        return any(transfer.is_relay for transfer in self.transfers)

    def __str__(self) -> str:
        names = sorted({transfer.source.name for transfer in self.transfers})
        relayed = " (relayed)" if self.is_relay else ""
        return f"rank {self.sender} -> rank {self.receiver}{relayed}: {first_few(names, 3)}"


@dataclass(frozen=True)
class TransferRows:
    """Transfer groups that move between two ranks: one layer's group per row, by (round, sender, receiver)."""

    group: Ints
    layer: Ints  # EMBEDDING, 0.., and the head as a layer after the last
    expert: Ints  # the first expert of the group; -1: none
    sender: Ints
    receiver: Ints
    round: Ints
    via: Ints  # the rank from which the sender received a relayed row in the previous round; otherwise -1
    offset: Ints  # elements before the row in its message
    numel: Ints


@dataclass(frozen=True)
class Plan:
    """All messages of one sync, the same on every rank. Arrays are over messages, by (round, sender, receiver)."""

    itemsize: int  # bytes of a unit that is counted
    num_rounds: int
    message_round: Ints
    message_sender: Ints
    message_receiver: Ints
    message_bytes: Ints
    rows: TransferRows
    first_row: Ints  # [messages + 1]
    placement: Placement

    @property
    def bytes_kept(self) -> int:
        """Bytes that receivers keep, including local copies."""
        return int(self.message_bytes.sum())

    @property
    def bytes_received(self) -> int:
        """Bytes that move between ranks: a rank receives only what it keeps and does not have."""
        return int(self.message_bytes[self.message_sender != self.message_receiver].sum())

    @property
    def bytes_relayed(self) -> int:
        """Part of bytes_received, relayed within nodes."""
        return int(self.itemsize * self.rows.numel[self.rows.via >= 0].sum())

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over all rows and transfer groups; ranks compare theirs before the first byte moves."""
        digest = hashlib.sha256(repr((self.itemsize, self.placement.groups)).encode())
        for name in TransferRows.__dataclass_fields__:
            digest.update(np.ascontiguousarray(getattr(self.rows, name)).data)
        return digest.hexdigest()

    def lower(self, rank: int) -> list[list[Message]]:
        """The messages that `rank` sends, receives or copies locally, by round (some rounds may be empty)."""
        mine = np.flatnonzero((self.message_sender == rank) | (self.message_receiver == rank))
        rounds: list[list[Message]] = [[] for _ in range(self.num_rounds)]
        for index in mine.tolist():
            number = int(self.message_round[index])
            ends = int(self.message_sender[index]), int(self.message_receiver[index])
            rows = range(int(self.first_row[index]), int(self.first_row[index + 1]))
            transfers = tuple(transfer for row in rows for transfer in self._transfers(row))
            rounds[number].append(Message(index, number, *ends, transfers))
        return rounds

    def _transfers(self, row: int) -> Iterator[Transfer]:
        rows, via, offset = self.rows, int(self.rows.via[row]), int(self.rows.offset[row])
        layer, first, group = (
            int(rows.layer[row]),
            int(rows.expert[row]),
            self.placement.groups[int(rows.group[row])],
        )
        sender, receiver = int(rows.sender[row]), int(rows.receiver[row])
        for expert, overlap in product(range(first, first + group.repeats), group.overlaps):
            kept = self.placement.destination(overlap, receiver, layer, expert)
            start, shape = overlap.start, overlap.shape
            if len(kept.shape) > len(shape):  # the tensor holds all experts
                start, shape = (expert, *start), (1, *shape)
            if via >= 0:
                source = replace(
                    whole_tensor(relay_buffer(via), shape),
                    name=kept.name,
                    start=start,
                    offset=offset,
                )
                offset += overlap.numel
            else:
                source = _part(self.placement.source(overlap, sender, layer, expert), start, shape)
            yield Transfer(source, _part(kept, start, shape), via >= 0)


def relay_buffer(sender: int) -> str:
    """The `param` that denotes the message received from `sender` in the previous round."""
    return f"message from rank {sender}"


def _part(whole: ShardSlice, start: tuple[int, ...], shape: tuple[int, ...]) -> ShardSlice:
    steps = (
        stride * (s - b) for s, b, stride in zip(start, whole.start, whole.strides, strict=True)
    )
    return ShardSlice(
        whole.name, start, shape, whole.param, whole.offset + sum(steps), whole.strides
    )


def plan_transfers(
    shape: ModelShape,
    fleet: Fleet,
    *,
    padded_vocab: int,
    itemsize: int,
    round_bytes: int,
    spec: LayerSpec = "te",
    fp8: BlockFormat | None = None,
) -> Plan:
    """Plans from the tables of trainer and engine. `padded_vocab`, `spec`: rows of the trainer's embedding, on all
    ranks, and its layer spec. `fp8`: the engine's blocks of linear layers; None: all move in `itemsize`. Raises
    ValueError naming the tensor if the trainer lacks a part of it that the engine keeps."""
    table, engine = megatron_table(shape, spec=spec, padded_vocab=padded_vocab), engine_table(shape)
    if fp8 is not None:
        table, engine = with_scales(table, fp8, is_whole=True), with_scales(engine, fp8)
    sizes = ElementSizes(itemsize, table.fp32, table.fp8)
    max_numel = _max_numel(round_bytes // sizes.unit, fleet.ranks_per_node)
    return _plan(
        FleetTables(shape, fleet, table, engine, sizes=sizes, max_numel=max_numel),
        sizes.unit,
        round_bytes,
    )


def plan_recorded(
    sources: SlicesByRank,
    destinations: SlicesByRank,
    *,
    itemsize: int,
    round_bytes: int,
    ranks_per_node: int | None = None,
) -> Plan:
    """Plans from the slices of every rank; `destinations` are in the order of the engine's layers. `ranks_per_node`:
    None puts all on one node. Raises ValueError naming a tensor whose sources overlap or do not cover a destination."""
    world = max(len(sources), len(destinations))
    per_node = min(ranks_per_node or world, world)
    max_numel = _max_numel(round_bytes // itemsize, per_node)
    return _plan(RecordedSlices(sources, destinations, per_node, max_numel), itemsize, round_bytes)


def _max_numel(round_numel: int, ranks_per_node: int) -> int:
    """Maximum size of a group, such that all copies that one rank relays within its node fit into a round."""
    return max(1, round_numel // max(GROUPS_PER_ROUND, ranks_per_node))


def _plan(placement: Placement, itemsize: int, round_bytes: int) -> Plan:
    hops, sizes = (
        assign_senders(placement),
        np.array([group.numel for group in placement.groups], dtype=np.int64),
    )
    rounds = assign_rounds(
        hops, sizes[hops.group], placement, round_numel=max(1, round_bytes // itemsize)
    )
    rows = _rows(hops, rounds, sizes)
    first = _first_rows(rows.sender, rows.receiver, rows.round)
    return Plan(
        itemsize=itemsize,
        num_rounds=int(rows.round.max(initial=-1)) + 1,
        message_round=rows.round[first[:-1]],
        message_sender=rows.sender[first[:-1]],
        message_receiver=rows.receiver[first[:-1]],
        message_bytes=itemsize * np.add.reduceat(rows.numel, first[:-1]),
        rows=rows,
        first_row=first,
        placement=placement,
    )


def _rows(hops: Hops, rounds: Ints, sizes: Ints) -> TransferRows:
    """Hops and relays, ordered by message."""
    relayed, count = hops.relay_hop, len(hops.group)
    sender = np.concatenate([hops.sender, hops.receiver[relayed]])
    receiver = np.concatenate([hops.receiver, hops.relay_receiver])
    rounds = np.concatenate([rounds, rounds[relayed] + 1])
    order = np.lexsort((receiver, sender, rounds))
    hop = np.concatenate([np.arange(count), relayed])[order]
    columns = (
        hops.group[hop],
        hops.layer[hop],
        hops.expert[hop],
        sender[order],
        receiver[order],
        rounds[order],
    )
    numel, first = sizes[columns[0]], _first_rows(*columns[3:])
    before = np.cumsum(numel) - numel
    offset = before - np.repeat(before[first[:-1]], np.diff(first))
    # a relay reads its row from the message of the first hop
    row_of_hop, is_relay = np.empty(len(order), dtype=np.int64), order >= count
    row_of_hop[order] = np.arange(len(order))
    offset[is_relay] = offset[row_of_hop[hop[is_relay]]]
    return TransferRows(*columns, np.where(is_relay, hops.sender[hop], np.int32(-1)), offset, numel)


def _first_rows(*columns: Ints) -> Ints:
    """[messages + 1]: where runs of equal values begin, and the number of rows."""
    changes = [np.diff(column, prepend=-1) != 0 for column in columns]
    return np.append(np.flatnonzero(np.logical_or.reduce(changes)), len(columns[0]))


def first_few(names: Sequence[str], most: int = 4, separator: str = ", ") -> str:
    """Returns the first names and the number of the others, for an error."""
    return separator.join(names[:most]) + (
        f" and {len(names) - most} more" if len(names) > most else ""
    )


def find_gaps(expected: Mapping[str, tuple[int, ...]], slices: SlicesByRank) -> list[str]:
    """Describes expected tensors that the ranks' slices do not cover, and slices of unexpected tensors."""
    numel: Counter[str] = Counter()
    for name, _, shape in sorted(
        {(part.name, part.start, part.shape) for of_rank in slices for part in of_rank}
    ):
        numel[name] += prod(shape)
    gaps = [
        f"{name} ({numel[name]} of {prod(shape)} elements)" if name in numel else f"{name} (absent)"
        for name, shape in expected.items()
        if numel[name] != prod(shape)
    ]
    return gaps + [f"{name} (not a tensor of this model)" for name in numel if name not in expected]
