"""The plan of a weight sync: which rank sends which bytes to which rank, in which round. No torch,
no communication.

    tables and a fleet | every rank's slices
        --> transfer groups --> senders --> rounds --> Plan --lower--> Messages

All ranks compute the same Plan as arrays over messages; each lowers its own messages to transfers.
In a round there is at most one flat message for each (sender, receiver), and no rank sends or
receives more than `round_bytes`, unless a single row of a tensor is larger. A rank may be a sender,
a receiver or both."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from math import prod

import numpy as np

from megarl.layout import Fleet
from megarl.models.engine import engine_table, with_scales
from megarl.models.formats import BlockFormat
from megarl.models.registry import megatron_table
from megarl.models.shape import ModelShape, Shape
from megarl.models.shards import ElementSizes, LayerSpec, ShardSlice, whole_tensor
from megarl.weights.plan.rounds import assign_rounds
from megarl.weights.plan.senders import Hops, assign_senders
from megarl.weights.plan.tables import (
    Ints,
    Placement,
    SlicesByRank,
    TablePlacement,
    TracedPlacement,
)

GROUPS_PER_ROUND = 16  # the largest groups fill 1/16 of a round


@dataclass(frozen=True)
class Transfer:
    """A rectangle of an HF tensor: the slices that the sender reads and the receiver writes. A
    relay is read from a message that arrived in the previous round: `source.param` is the
    `relay_buffer` of that message's sender."""

    source: ShardSlice
    destination: ShardSlice
    is_relay: bool = False


@dataclass(frozen=True)
class Message:
    """One flat buffer: its transfers end to end, each in row-major order. A message with
    `sender == receiver` is a local copy."""

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
        """True if the sender receives part of the message in the previous round."""
        return any(transfer.is_relay for transfer in self.transfers)

    def __str__(self) -> str:
        names = sorted({transfer.source.name for transfer in self.transfers})
        receiver = f"rank {self.receiver}"
        if self.is_relay:
            receiver += " (relayed)"
        return f"rank {self.sender} -> {receiver}: {first_few(names, 3)}"


@dataclass(frozen=True)
class TransferRows:
    """Transfer groups that move between two ranks: a row per group, layer and expert, sorted by
    (round, sender, receiver)."""

    group: Ints
    layer: Ints  # EMBEDDING, 0.., and the head as a layer after the last
    expert: Ints  # the first expert of the group; -1: none
    sender: Ints
    receiver: Ints
    round: Ints
    via: Ints  # the rank that sent a relayed row to `sender` in the previous round; otherwise -1
    offset: Ints  # elements before the row in its message; for a relay, in the received message
    numel: Ints


@dataclass(frozen=True)
class Plan:
    """All messages of one sync, the same on every rank. Arrays are [messages], sorted by (round,
    sender, receiver)."""

    itemsize: int  # bytes of a transfer element
    num_rounds: int
    message_round: Ints
    message_sender: Ints
    message_receiver: Ints
    message_bytes: Ints
    rows: TransferRows
    first_row: Ints  # [messages + 1], index into `rows`
    placement: Placement

    @property
    def bytes_kept(self) -> int:
        """Bytes that receivers store, including local copies."""
        return int(self.message_bytes.sum())

    @property
    def bytes_received(self) -> int:
        """Bytes that move between ranks. A rank receives only what it stores and does not have."""
        return int(self.message_bytes[self.message_sender != self.message_receiver].sum())

    @property
    def bytes_relayed(self) -> int:
        """The part of `bytes_received` that is relayed within nodes."""
        return int(self.itemsize * self.rows.numel[self.rows.via >= 0].sum())

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of all rows and transfer groups. Ranks compare their fingerprints before the first
        byte moves."""
        digest = hashlib.sha256(repr((self.itemsize, self.placement.groups)).encode())
        for column in vars(self.rows).values():
            digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()

    def lower(self, rank: int) -> list[list[Message]]:
        """Returns the messages that `rank` sends, receives or copies locally: one list per round,
        possibly empty."""
        is_mine = (self.message_sender == rank) | (self.message_receiver == rank)
        rounds = [[] for _ in range(self.num_rounds)]
        for index in np.flatnonzero(is_mine).tolist():
            rows = range(*self.first_row[index : index + 2].tolist())
            message = Message(
                index,
                round=int(self.message_round[index]),
                sender=int(self.message_sender[index]),
                receiver=int(self.message_receiver[index]),
                transfers=tuple(chain.from_iterable(map(self._transfers, rows))),
            )
            rounds[message.round].append(message)
        return rounds

    def _transfers(self, row: int) -> Iterator[Transfer]:
        rows = self.rows
        via = int(rows.via[row])
        offset = int(rows.offset[row])
        layer = int(rows.layer[row])
        first = int(rows.expert[row])
        group = self.placement.groups[int(rows.group[row])]
        sender = int(rows.sender[row])
        receiver = int(rows.receiver[row])
        for expert, overlap in product(range(first, first + group.repeats), group.overlaps):
            kept = self.placement.slice_of(
                overlap.destinations, receiver, layer, expert, is_source=False
            )
            start = overlap.start
            shape = overlap.shape
            if len(kept.shape) > len(shape):  # the HF tensor stacks all experts
                start = (expert, *start)
                shape = (1, *shape)
            if via >= 0:
                buffer = whole_tensor(relay_buffer(via), shape)
                source = replace(buffer, name=kept.name, start=start, offset=offset)
                offset += overlap.numel
            else:
                source = self.placement.slice_of(
                    overlap.sources, sender, layer, expert, is_source=True
                )
                source = _part(source, start, shape)
            yield Transfer(source, _part(kept, start, shape), via >= 0)


def relay_buffer(sender: int) -> str:
    """Returns the `param` that denotes the message received from `sender` in the previous round."""
    return f"message from rank {sender}"


def _part(whole: ShardSlice, start: Shape, shape: Shape) -> ShardSlice:
    offset = whole.offset
    for first, begin, stride in zip(start, whole.start, whole.strides, strict=True):
        offset += stride * (first - begin)
    return replace(whole, start=start, shape=shape, offset=offset)


def plan_transfers(
    shape: ModelShape,
    fleet: Fleet,
    *,
    padded_vocab: int,
    itemsize: int,
    round_bytes: int,
    spec: LayerSpec = "te",
    fmt: BlockFormat | None = None,
) -> Plan:
    """Returns the plan for the tables of trainer and engine. `padded_vocab`: rows of the trainer's
    embedding over all ranks. `spec`: the trainer's layer spec. `fmt`: block format of the engine's
    linear layers; None: they move with `itemsize` bytes per element. Raises ValueError naming the
    tensor if the trainer lacks a part of it that the engine stores."""
    table = megatron_table(shape, spec=spec, padded_vocab=padded_vocab)
    if fmt is not None:
        table = with_scales(table, fmt, is_whole=True)
    sizes = ElementSizes(8 * itemsize, table.bits)
    itemsize = sizes.unit // 8
    placement = TablePlacement(
        shape,
        fleet,
        table,
        engine_table(shape, fmt, tensor=fleet.tensor, expert=fleet.expert),
        sizes=sizes,
        max_numel=_max_numel(round_bytes // itemsize, fleet.ranks_per_node),
    )
    return _plan(placement, itemsize, round_bytes)


def plan_recorded(
    sources: SlicesByRank,
    destinations: SlicesByRank,
    *,
    itemsize: int,
    round_bytes: int,
    ranks_per_replica: int = 1,
    ranks_per_node: int | None = None,
) -> Plan:
    """Returns the plan for the slices of every rank. `destinations` are in the order of the
    engine's layers. `ranks_per_replica`: of those that receive. `ranks_per_node`: None puts all
    ranks on one node. Raises ValueError naming a
    tensor whose sources overlap or do not cover a destination."""
    world = max(len(sources), len(destinations))
    per_node = min(ranks_per_node or world, world)
    max_numel = _max_numel(round_bytes // itemsize, per_node)
    placement = TracedPlacement(sources, destinations, ranks_per_replica, per_node, max_numel)
    return _plan(placement, itemsize, round_bytes)


def _max_numel(round_numel: int, ranks_per_node: int) -> int:
    """Returns the maximum elements of a group, such that all copies of it that a rank relays within
    its node fit into a round."""
    return max(1, round_numel // max(GROUPS_PER_ROUND, ranks_per_node))


def _plan(placement: Placement, itemsize: int, round_bytes: int) -> Plan:
    hops = assign_senders(placement)
    sizes = np.array([group.numel for group in placement.groups], dtype=np.int64)
    rounds = assign_rounds(
        hops, sizes[hops.group], placement, round_numel=max(1, round_bytes // itemsize)
    )
    rows = _rows(hops, rounds, sizes)
    first_row = _first_rows(rows.sender, rows.receiver, rows.round)
    first = first_row[:-1]
    return Plan(
        itemsize=itemsize,
        num_rounds=int(rows.round.max(initial=-1)) + 1,
        message_round=rows.round[first],
        message_sender=rows.sender[first],
        message_receiver=rows.receiver[first],
        message_bytes=itemsize * np.add.reduceat(rows.numel, first),
        rows=rows,
        first_row=first_row,
        placement=placement,
    )


def _rows(hops: Hops, rounds: Ints, sizes: Ints) -> TransferRows:
    """Returns the rows of hops and relays, sorted by message."""
    relayed = hops.relay_hop
    count = len(hops.group)
    sender = np.concatenate([hops.sender, hops.receiver[relayed]])
    receiver = np.concatenate([hops.receiver, hops.relay_receiver])
    rounds = np.concatenate([rounds, rounds[relayed] + 1])
    order = np.lexsort((receiver, sender, rounds))
    is_relay = order >= count
    hop = np.concatenate([np.arange(count), relayed])[order]
    sender = sender[order]
    receiver = receiver[order]
    rounds = rounds[order]
    numel = sizes[hops.group[hop]]
    first = _first_rows(sender, receiver, rounds)
    before = np.cumsum(numel) - numel
    offset = before - np.repeat(before[first[:-1]], np.diff(first))
    # a relay reads its row from the message of the first hop
    row_of_hop = np.empty(len(order), dtype=np.int64)
    row_of_hop[order] = np.arange(len(order))
    offset[is_relay] = offset[row_of_hop[hop[is_relay]]]
    return TransferRows(
        group=hops.group[hop],
        layer=hops.layer[hop],
        expert=hops.expert[hop],
        sender=sender,
        receiver=receiver,
        round=rounds,
        via=np.where(is_relay, hops.sender[hop], np.int32(-1)),
        offset=offset,
        numel=numel,
    )


def _first_rows(*columns: Ints) -> Ints:
    """Returns [messages + 1]: the first row of each run of equal values, and the number of rows."""
    changes = [np.diff(column, prepend=-1) != 0 for column in columns]
    return np.append(np.flatnonzero(np.logical_or.reduce(changes)), len(columns[0]))


def first_few(names: Sequence[str], most: int = 4, separator: str = ", ") -> str:
    """Returns the first names and the number of remaining names, for an error message."""
    text = separator.join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


def find_gaps(expected: Mapping[str, Shape], slices: SlicesByRank) -> list[str]:
    """Describes expected tensors that the ranks' slices do not cover, and slices of unexpected
    tensors."""
    regions = {(part.name, part.start, part.shape) for part in chain.from_iterable(slices)}
    numel = Counter()
    for name, _, shape in sorted(regions):
        numel[name] += prod(shape)
    gaps = []
    for name, shape in expected.items():
        if name not in numel:
            gaps.append(f"{name} (absent)")
        elif numel[name] != prod(shape):
            gaps.append(f"{name} ({numel[name]} of {prod(shape)} elements)")
    return gaps + [f"{name} (not a tensor of this model)" for name in numel if name not in expected]
