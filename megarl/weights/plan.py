"""The plan of a weight sync: which bytes go from which rank to which, in which round. No torch, no communication.

    tables and a fleet | every rank's slices --> transfer groups --> senders --> rounds --> Plan --lower--> RankPlan

All ranks compute the same Plan as arrays over messages; each lowers its own messages to transfers. In a round there is
at most one flat message for each (sender, receiver), and no rank sends or receives more than `round_bytes`, unless a
single row is larger. A rank may be a sender, a receiver or both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from megarl.layout import Axis, Layout, stage_layers
from megarl.models.engine import engine_table
from megarl.models.registry import megatron_table
from megarl.models.shape import ModelShape
from megarl.models.shards import Rule, ShardSlice, Style, Table, of_expert
from megarl.weights.fleet import Fleet
from megarl.weights.fp32_views import view_fp32_as_16bit
from megarl.weights.plan_rounds import assign_rounds
from megarl.weights.senders import EMBEDDING, Hops, Ints, assign_senders, assign_table_senders
from megarl.weights.transfer_groups import Overlap, TransferGroup, transfer_groups

__all__ = [
    "Message", "Plan", "RankPlan", "SlicesByRank", "Transfer", "View", "find_gaps", "plan_recorded", "plan_transfers",
    "relay_buffer",
]  # fmt: skip

SlicesByRank = Sequence[Sequence[ShardSlice]]
PARTS = 16  # a group is at most this part of a round, so that rounds can be filled


@dataclass(frozen=True, slots=True)
class View:
    """Part of a rank's memory: `param` viewed with `strides` from `offset`, in elements."""

    param: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """[start, start + shape) of HF tensor `name`, where the sender reads it and where the receiver writes it.

    A relayed one is read from the flat message that came from another rank one round before: the source's `param` is
    then `relay_buffer` of that rank.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    source: View
    destination: View
    is_relay: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Message:
    """One flat buffer: its transfers end to end, each in row-major order. `sender == receiver`: nothing travels."""

    index: int  # among all messages of the plan
    round: int
    sender: int
    receiver: int
    transfers: tuple[Transfer, ...]

    @property
    def numel(self) -> int:
        return sum(transfer.numel for transfer in self.transfers)

    @property
    def is_relay(self) -> bool:
        """Some of it must have arrived, in the round before, when it is packed."""
        return any(transfer.is_relay for transfer in self.transfers)

    def __str__(self) -> str:
        names = sorted({transfer.name for transfer in self.transfers})
        rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
        relayed = " (relayed)" if self.is_relay else ""
        return f"rank {self.sender} -> rank {self.receiver}{relayed}: {', '.join(names[:3])}{rest}"


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The messages that a rank sends, receives or keeps, round by round (some rounds may be empty)."""

    rank: int
    itemsize: int
    rounds: tuple[tuple[Message, ...], ...]


@dataclass(frozen=True)
class Rows:
    """What moves between two ranks, a transfer group of one layer a row, ordered by (round, sender, receiver)."""

    group: Ints
    layer: Ints  # EMBEDDING, 0.., and the head as a layer behind the last
    expert: Ints  # -1: none
    sender: Ints
    receiver: Ints
    round: Ints
    via: Ints  # of a relayed row, the rank its sender received it from one round before; else -1
    offset: Ints  # elements before it in its message
    numel: Ints


@dataclass(frozen=True)
class Plan:
    """All messages of one sync, the same on every rank. Arrays are over messages, by (round, sender, receiver)."""

    itemsize: int  # bytes of an element
    num_rounds: int
    message_round: Ints
    message_sender: Ints
    message_receiver: Ints
    message_bytes: Ints
    rows: Rows
    first_row: Ints  # [messages + 1]
    _groups: Sequence[TransferGroup]
    _slices: _Slices

    @property
    def bytes_kept(self) -> int:
        """All that receivers keep, what they hold already included."""
        return int(self.message_bytes.sum())

    @property
    def bytes_received(self) -> int:
        """What moves between ranks: a rank receives only what it keeps and does not hold."""
        return int(self.message_bytes[self.message_sender != self.message_receiver].sum())

    @property
    def bytes_relayed(self) -> int:
        return int(self.itemsize * self.rows.numel[self.rows.via >= 0].sum())

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over all rows and transfer groups; ranks compare theirs before the first byte moves."""
        digest = hashlib.sha256(repr((self.itemsize, self._groups)).encode())
        for name in Rows.__dataclass_fields__:
            digest.update(np.ascontiguousarray(getattr(self.rows, name)).data)
        return digest.hexdigest()

    def lower(self, rank: int) -> RankPlan:
        mine = np.flatnonzero((self.message_sender == rank) | (self.message_receiver == rank))
        rounds: list[list[Message]] = [[] for _ in range(self.num_rounds)]
        for index in mine.tolist():
            number = int(self.message_round[index])
            ends = int(self.message_sender[index]), int(self.message_receiver[index])
            rows = range(int(self.first_row[index]), int(self.first_row[index + 1]))
            transfers = tuple(transfer for row in rows for transfer in self._transfers(row))
            rounds[number].append(Message(index, number, *ends, transfers))
        return RankPlan(rank, self.itemsize, tuple(map(tuple, rounds)))

    def _transfers(self, row: int) -> Iterator[Transfer]:
        rows, via, offset = self.rows, int(self.rows.via[row]), int(self.rows.offset[row])
        place = (int(rows.layer[row]), int(rows.expert[row]))
        sender, receiver = int(rows.sender[row]), int(rows.receiver[row])
        for overlap in self._groups[int(rows.group[row])].overlaps:
            destination = self._slices.destination(overlap, receiver, *place)
            start, shape = overlap.start, overlap.shape
            if len(destination.shape) > len(shape):  # the tensor holds all experts
                start, shape = (place[1], *start), (1, *shape)
            if via >= 0:
                strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
                source = View(relay_buffer(via), offset, strides)
                offset += overlap.numel
            else:
                source = _view(self._slices.source(overlap, sender, *place), start)
            yield Transfer(destination.name, start, shape, source, _view(destination, start), via >= 0)


def relay_buffer(sender: int) -> str:
    """The `View.param` that stands for the message which came from `sender` one round before."""
    return f"message from rank {sender}"


def _view(part: ShardSlice, start: tuple[int, ...]) -> View:
    steps = (stride * (s - b) for s, b, stride in zip(start, part.start, part.strides, strict=True))
    return View(part.param, part.offset + sum(steps), part.strides)


def plan_transfers(
    shape: ModelShape, fleet: Fleet, *, padded_vocab: int, itemsize: int, round_bytes: int, style: Style = "te"
) -> Plan:
    """From the tables of trainer and engine.

    `padded_vocab`: rows of the trainer's embedding over all its tensor ranks. `style`: the layer spec of its modules.
    Raises ValueError naming the tensor when the trainer does not hold what the engine keeps.
    """
    slices = _TableSlices(shape, fleet, megatron_table(shape, style=style, padded_vocab=padded_vocab), itemsize)
    max_numel = max(1, round_bytes // itemsize // max(PARTS, fleet.ranks_per_node))
    sections = {name: slices.groups(name, max_numel) for name in ("embedding", "dense", "layer", "expert", "head")}
    hops = assign_table_senders(shape, fleet, sections)
    groups = [group for section in sections.values() for group in section]
    return _plan(hops, groups, slices, fleet.world, fleet.ranks_per_node, itemsize, round_bytes)


def plan_recorded(
    sources: SlicesByRank,
    destinations: SlicesByRank,
    *,
    itemsize: int,
    round_bytes: int,
    ranks_per_node: int | None = None,
) -> Plan:
    """From the slices that every rank holds and keeps, where a family has no table. A receiver's are in the order of
    its layers. `ranks_per_node`: None: all ranks are on one node.

    Raises ValueError naming the tensor when the sources overlap or do not hold all that is kept.
    """
    world = max(len(sources), len(destinations))
    per_node = min(ranks_per_node or world, world)
    ordered = sorted(
        ((place, rank, part) for rank, slices in enumerate(destinations) for place, part in enumerate(slices)),
        key=lambda entry: entry[:2],
    )
    groups = transfer_groups(
        ((rank, part) for rank, slices in enumerate(sources) for part in slices),
        ((rank, part) for _, rank, part in ordered),
        max_numel=max(1, round_bytes // itemsize // max(PARTS, per_node)),
    )
    hops = assign_senders(groups, world=world, ranks_per_node=per_node)
    return _plan(hops, groups, _RecordedSlices(), world, per_node, itemsize, round_bytes)


def _plan(
    hops: Hops,
    groups: Sequence[TransferGroup],
    slices: _Slices,
    world: int,
    per_node: int,
    itemsize: int,
    round_bytes: int,
) -> Plan:
    sizes = np.array([group.numel for group in groups], dtype=np.int64)
    numel = sizes[hops.group]
    rounds = assign_rounds(
        hops, numel, world=world, ranks_per_node=per_node, round_numel=max(1, round_bytes // itemsize)
    )
    relayed = hops.relay_hop
    sender = np.concatenate([hops.sender, hops.receiver[relayed]])
    receiver = np.concatenate([hops.receiver, hops.relay_receiver])
    rounds = np.concatenate([rounds, rounds[relayed] + 1])
    key = (rounds.astype(np.int64) * world + sender) * world + receiver
    order = np.argsort(key, kind="stable")
    key = key[order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    numel = np.concatenate([numel, numel[relayed]])[order]
    before = np.cumsum(numel) - numel
    offset = before - np.repeat(before[first], np.diff(first, append=len(key)))
    # where each relay's data lies in the message of its first hop
    hop_row = np.empty(len(order), dtype=np.int64)
    hop_row[order] = np.arange(len(order))
    is_relay = order >= len(hops.group)
    hop = relayed[order[is_relay] - len(hops.group)]
    via = np.full(len(order), -1, dtype=np.int32)
    via[is_relay] = hops.sender[hop]
    offset[is_relay] = offset[hop_row[hop]]
    source = np.concatenate([np.arange(len(hops.group)), relayed])[order]
    rows = Rows(
        hops.group[source],
        hops.layer[source],
        hops.expert[source],
        sender[order],
        receiver[order],
        rounds[order],
        via,
        offset,
        numel,
    )
    return Plan(
        itemsize=itemsize,
        num_rounds=int(rounds.max(initial=-1)) + 1,
        message_round=rows.round[first],
        message_sender=rows.sender[first],
        message_receiver=rows.receiver[first],
        message_bytes=itemsize * np.add.reduceat(numel, first),
        rows=rows,
        first_row=np.append(first, len(key)),
        _groups=groups,
        _slices=slices,
    )


class _RecordedSlices:
    """Coordinates are ranks."""

    def source(self, overlap: Overlap, rank: int, layer: int, expert: int) -> ShardSlice:
        return overlap.sources[rank]

    def destination(self, overlap: Overlap, rank: int, layer: int, expert: int) -> ShardSlice:
        return overlap.destinations[rank]


class _TableSlices:
    """Groups of templates, and the slice that a template stands for on a rank."""

    def __init__(self, shape: ModelShape, fleet: Fleet, table: Table, itemsize: int) -> None:
        self._shape, self._fleet, self._trainer, self._itemsize = shape, fleet, table, itemsize
        self._engine = engine_table(shape)
        etp = fleet.engine_layout(fleet.first_receiver).etp.size
        self._strides = _expert_strides(table.expert, fleet.parallel.expert_tensor) | _expert_strides(
            self._engine.expert, etp
        )
        self._engine_sizes = (fleet.tensor, etp)

    def groups(self, section: str, max_numel: int) -> list[TransferGroup]:
        fleet, is_expert, shape = self._fleet, section == "expert", self._shape
        if (section == "dense" and not shape.dense_layers) or (
            section == "layer" and shape.dense_layers == shape.layers
        ):
            return []
        size = fleet.parallel.expert_tensor if is_expert else fleet.parallel.tensor
        sources = list(self._templates(getattr(self._trainer, section), size))
        if section == "embedding" and fleet.parallel.pipeline > 1:  # the copy on the last stage
            sources += [(size + rank, part) for rank, part in self._templates(self._trainer.tied, size)]
        destinations = self._templates(getattr(self._engine, section), self._engine_sizes[is_expert])
        return transfer_groups(sources, destinations, max_numel=max_numel, is_expert=is_expert)

    def _templates(self, rules: Sequence[Rule], size: int) -> Iterator[tuple[int, ShardSlice]]:
        for rank in range(size):
            slices = [part for rule in rules for part in rule.slices(Axis(size, rank))]
            for part in view_fp32_as_16bit(slices, self._trainer.fp32, self._itemsize):
                yield rank, part

    def source(self, overlap: Overlap, rank: int, layer: int, expert: int) -> ShardSlice:
        layout = self._fleet.trainer_layout(rank)
        coordinate = layout.etp.rank if expert >= 0 else layout.tp.rank
        if layer == EMBEDDING and not layout.pp.first:
            coordinate += layout.tp.size
        return self._fill(overlap.sources[coordinate], layout, layer, expert)

    def destination(self, overlap: Overlap, rank: int, layer: int, expert: int) -> ShardSlice:
        layout = self._fleet.engine_layout(rank)
        coordinate = layout.etp.rank if expert >= 0 else layout.tp.rank
        return self._fill(overlap.destinations[coordinate], layout, layer, expert)

    def _fill(self, part: ShardSlice, layout: Layout, layer: int, expert: int) -> ShardSlice:
        """A template with its numbers filled in: of a global layer and expert (-1: none)."""
        chunks = stage_layers(self._shape.layers, layout)
        number = next((n for n, layers in enumerate(chunks) if layer in layers), 0 if layer == EMBEDDING else -1)
        if layer == EMBEDDING and not layout.pp.first:
            number = -1
        local_layer, chunk = layer - chunks[number].start, f"chunk{number % len(chunks)}." if len(chunks) > 1 else ""
        local = expert
        if expert >= 0:
            local = expert % (self._shape.experts // layout.ep.size)
            part = of_expert(part, local, expert, self._strides[part.param])
        name = part.name.format(layer=layer, expert=expert)
        return replace(part, name=name, param=chunk + part.param.format(layer=local_layer, expert=local))


_Slices = _TableSlices | _RecordedSlices


def _expert_strides(rules: Sequence[Rule], size: int) -> dict[str, int]:
    """Elements of one expert in each parameter of these rules, on any rank of an axis of `size`."""
    strides: dict[str, int] = {}
    for rule in rules:
        for part in rule.slices(Axis(size)):
            strides[part.param] = strides.get(part.param, 0) + part.numel
    return strides


def find_gaps(expected: Mapping[str, tuple[int, ...]], slices: SlicesByRank) -> list[str]:
    """What the slices of all these ranks together lack of the expected tensors, or hold beyond them; [] if complete."""
    rectangles = {(part.name, part.start, part.shape) for of_rank in slices for part in of_rank}
    numel: dict[str, int] = {}
    for name, _, shape in sorted(rectangles):
        numel[name] = numel.get(name, 0) + prod(shape)
    gaps = [
        f"{name} ({numel[name]} of {prod(shape)} elements)" if name in numel else f"{name} (absent)"
        for name, shape in expected.items()
        if numel.get(name, 0) != prod(shape)
    ]
    return gaps + [f"{name} (not a tensor of this model)" for name in numel if name not in expected]
