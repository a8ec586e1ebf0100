"""The actor's weights into the engine, shard to shard, verified every time.

    connect:  receivers' boxes gathered, names checked against the checkpoint's, one plan, its fingerprint compared
    publish:  roll call -> begin -> per round: pack, send, write, read back -> checksums compared -> seal -> places
              -> probe -> finish(version)

A checksum is taken of every bucket as packed and of the memory it was written to; both go into one table that is
summed over all ranks, so every rank sees every fault and all refuse together. On the first sync (always, where the
probe is) a second one proves that each slice lies in its place, plan or no plan (places.py). What fails before `begin`
(a rank that does not come, a parameter that is not there) leaves the engine as it was, serving its old version.
Whatever fails after leaves it without a version: it refuses prompts until a sync succeeds.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from megarl.types import CheckFailed, PublishReport
from megarl.weights.digest import digest
from megarl.weights.mapping import Box, by_pairs
from megarl.weights.models.engine import disagreement
from megarl.weights.places import Places
from megarl.weights.plan import Boxes, Message, Plan, find_gaps, make_plan
from megarl.weights.transports import Transport
from megarl.weights.words import boxes_in_words, shapes_in_words

__all__ = ["BUCKET_BYTES", "Probe", "Publisher", "Receiver"]

BUCKET_BYTES = 256 << 20


class Receiver(Protocol):
    """One rank of an engine as weights see it: begin, write ..., seal, finish; abort at any time."""

    @property
    def boxes(self) -> Sequence[Box]:
        """What this rank keeps of each HF tensor, in the order of its layers."""
        ...

    def begin(self, *, places: bool) -> None:
        """`places`: a checksum of every box will be asked for."""
        ...

    def write(self, message: Message, flat: Tensor) -> Tensor:
        """Write a bucket [numel]; the same elements as read back from where they were written."""
        ...

    def seal(self) -> Mapping[str, int]:
        """All is written: elements received of each HF tensor. Raises CheckFailed when a layer is incomplete."""
        ...

    def places(self) -> Tensor:
        """[boxes] int64: `digest.placed` of each box, read from where it lay in checkpoint form."""
        ...

    def finish(self, version: int) -> None: ...
    def abort(self) -> None: ...


@dataclass(frozen=True)
class Probe:
    """A fixed batch scored by both sides: re-packing faults show in log-probs and nowhere else.

    `trainer` and `engine` map tokens [N, L] to log-probs [N, L - 1] of tokens[:, 1:] at temperature 1, on every rank.
    """

    tokens_NL: Tensor
    trainer: Callable[[Tensor], Tensor]
    engine: Callable[[Tensor], Tensor]
    max: float  # bounds on |engine - trainer|, nats
    mean: float
    always: bool = False  # False: only the first sync of a run


@dataclass(frozen=True)
class _Packed:
    outgoing: dict[int, Tensor]  # by destination
    staying: list[tuple[int, Tensor]]  # (message, its elements)


class Publisher:
    """roles.Weights. Build it with `connect`, on every rank."""

    def __init__(
        self,
        plan: Plan,
        receiver: Receiver,
        transport: Transport,
        parameters: Callable[[], Mapping[str, Tensor]],
        dtype: torch.dtype,
        num_tensors: int,
        probe: Probe | None = None,
        fp32: frozenset[str] = frozenset(),
        places: Places | None = None,
    ) -> None:
        self.plan = plan
        self._places = places
        self._receiver = receiver
        self._transport = transport
        self._parameters = parameters
        self._dtype = dtype
        self._num_tensors = num_tensors
        self._probe = probe
        self._proven = False
        self._needed = _extents(plan, transport.rank)
        mine = (message for message in plan.messages if message.source == transport.rank)
        self._fp32_parameters = {p.source.param for message in mine for p in message.pieces if p.name in fp32}
        self._device = next(iter(parameters().values())).device
        self._first = [0, *accumulate(len(round_) for round_ in plan.rounds)]  # [rounds + 1] message each begins with

    @classmethod
    def connect(
        cls,
        *,
        sources: Boxes,  # [rank] -> where its parameters hold HF tensors
        expected: Mapping[str, tuple[int, ...]],  # every tensor of the checkpoint with its shape
        parameters: Callable[[], Mapping[str, Tensor]],
        receiver: Receiver,
        replica_ranks: int,
        transport: Transport,
        dtype: torch.dtype,
        bucket_bytes: int = BUCKET_BYTES,
        probe: Probe | None = None,
        fp32: frozenset[str] = frozenset(),  # HF tensors that stay fp32 on both sides; the receiver knows them too
        table: Sequence[Box] | None = None,  # what the family's table says that this rank of the engine keeps
    ) -> Publisher:
        """Raises CheckFailed, on all ranks, when a tensor is missing on either side, when the engine keeps one
        elsewhere than its table says, or when ranks plan differently."""
        destinations: list[list[Box]] = transport.gather(list(receiver.boxes))
        if table is not None:
            said = transport.gather(disagreement(boxes_in_words(table, fp32, dtype.itemsize), receiver.boxes))
            if wrong := [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]:
                raise CheckFailed(f"{wrong[0]}: this vLLM lays weights out otherwise than the one megarl is made for")
        paired = {b.name for boxes in sources for b in boxes if len(b.shape) > len(expected[b.name])}
        destinations = [[by_pairs(b) if b.name in paired else b for b in boxes] for boxes in destinations]
        sources = [boxes_in_words(boxes, fp32, dtype.itemsize) for boxes in sources]
        expected = shapes_in_words(expected, fp32, dtype.itemsize)
        _refuse_gaps("the trainer's ranks hold no complete", find_gaps(expected, sources))
        for first in range(0, transport.world, replica_ranks):
            ranks = range(first, first + replica_ranks)
            who = f"the engine on ranks {ranks.start}..{ranks.stop - 1} takes no complete"
            _refuse_gaps(who, find_gaps(expected, [_distinct(destinations[r] for r in ranks)]))
        try:
            plan = make_plan(sources, destinations, itemsize=dtype.itemsize, bucket_bytes=bucket_bytes)
        except ValueError as error:
            raise CheckFailed(f"no plan moves the weights: {error}") from None
        prints = transport.gather(plan.fingerprint)
        if len(set(prints)) > 1:
            odd = [rank for rank, seen in enumerate(prints) if seen != prints[0]]
            raise CheckFailed(f"ranks {odd} plan other transfers than rank 0: start all ranks with one configuration")
        places = Places.of(list(expected), sources, destinations, replica_ranks, dtype, frozenset(paired))
        return cls(plan, receiver, transport, parameters, dtype, len(expected), probe, fp32, places)

    def publish(self, *, version: int) -> PublishReport:
        """Raises CheckFailed, on all ranks, when anything is missing or changed; the engine then refuses prompts."""
        began = time.perf_counter()
        self._transport.roll_call(f"the sync of weights, version {version}")
        parameters = self._parameters()
        self._agree(self._lacking(parameters), "the engine keeps the version it had")
        places = self._places if not self._proven or (self._probe is not None and self._probe.always) else None
        self._receiver.begin(places=places is not None)
        try:
            sent, received, fault = self._move(parameters)
            self._compare(sent, received, fault)
            self._agree(self._seal())
            if places is not None:
                places.compare(self._transport, parameters, self._receiver.places())
            self._prove()
        except BaseException:
            self._receiver.abort()
            raise
        self._proven = True
        self._receiver.finish(version)
        seconds = time.perf_counter() - began
        return PublishReport(
            version, self._num_tensors, self.plan.bytes_kept, self.plan.bytes_received, verified=True, seconds=seconds
        )

    def _lacking(self, parameters: Mapping[str, Tensor]) -> str | None:
        """What the plan reads here and the trainer does not hold."""
        for name, numel in self._needed.items():
            tensor = parameters.get(name)
            if tensor is None:
                return f"the trainer has no parameter {name}"
            expected = torch.float32 if name in self._fp32_parameters else self._dtype
            words = tensor.numel() * tensor.itemsize // self._dtype.itemsize
            if tensor.dtype != expected or words < numel or not tensor.is_contiguous():
                seen = (
                    f"{tensor.numel()} elements of {tensor.dtype}, {'' if tensor.is_contiguous() else 'not '}contiguous"
                )
                return f"parameter {name} has {seen}; the plan reads {numel} contiguous words of {expected}"
        return None

    def _move(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, str | None]:
        """Run all rounds. A write that fails is remembered and the rounds go on, for the peers' sake."""
        fault = None
        sent = torch.zeros(len(self.plan.messages), dtype=torch.int64, device=self._device)  # [messages]
        received = torch.zeros_like(sent)
        packed = self._pack_round(0, parameters, sent)
        for number in range(len(self.plan.rounds)):
            current, incoming = packed, self._incoming(number)
            wait = self._transport.start(current.outgoing, {peer: flat for peer, (_, flat) in incoming.items()})
            packed = self._pack_round(number + 1, parameters, sent)  # while this round is in flight
            arrived = [*current.staying, *incoming.values()]
            for position, (index, flat) in enumerate(arrived):
                if position == len(current.staying):
                    wait()
                if fault is None:
                    try:
                        received[index] = digest(self._receiver.write(self.plan.messages[index], flat))
                    except Exception as error:  # noqa: BLE001 (told to all ranks below; peers still wait for our rounds)
                        fault = f"{self._bucket(index)}: {type(error).__name__}: {error}"
            wait()
        return sent, received, fault

    def _pack_round(self, number: int, parameters: Mapping[str, Tensor], sent: Tensor) -> _Packed:
        """What this rank sends in a round, and what stays here; nothing behind the last round."""
        packed = _Packed({}, [])
        for index in self._of_round(number):
            message = self.plan.messages[index]
            if message.source == self._transport.rank:
                flat = _pack(message, parameters, self._dtype, self._device)
                sent[index] = digest(flat)
                if message.destination == self._transport.rank:
                    packed.staying.append((index, flat))
                else:
                    packed.outgoing[message.destination] = flat
        return packed

    def _incoming(self, number: int) -> dict[int, tuple[int, Tensor]]:
        """Source rank -> (message, room for it)."""
        rank, found = self._transport.rank, {}
        for index in self._of_round(number):
            message = self.plan.messages[index]
            if message.destination == rank != message.source:
                found[message.source] = index, torch.empty(message.numel, dtype=self._dtype, device=self._device)
        return found

    def _of_round(self, number: int) -> range:
        """The messages of a round, counted over all of them."""
        return range(*self._first[number : number + 2]) if number < len(self.plan.rounds) else range(0)

    def _bucket(self, index: int) -> str:
        number = bisect_right(self._first, index)
        return f"bucket {index + 1} of {len(self.plan.messages)} (round {number}), {self.plan.messages[index]}"

    def _compare(self, sent: Tensor, received: Tensor, fault: str | None) -> None:
        self._agree(fault)
        sent, received = self._transport.sum(torch.stack([sent, received]))
        changed = (sent != received).nonzero().flatten().tolist()
        if changed:
            shown = "; ".join(self._bucket(index) for index in changed[:4])
            raise CheckFailed(
                f"{len(changed)} of {len(self.plan.messages)} weight buckets were not received as sent: {shown}. "
                "The engine refuses prompts; if it happens again, suspect the link or the memory of these ranks"
            )

    def _seal(self) -> str | None:
        """Names and sizes loaded against those this rank keeps."""
        try:
            loaded = self._receiver.seal()
        except CheckFailed as error:
            return str(error)
        kept: dict[str, int] = {}
        for box in self._receiver.boxes:
            kept[box.name] = kept.get(box.name, 0) + box.numel
        wrong = [name for name in kept.keys() | loaded.keys() if kept.get(name) != loaded.get(name)]
        return f"tensors loaded differ from those expected: {', '.join(sorted(wrong)[:4])}" if wrong else None

    def _prove(self) -> None:
        """Both sides score the probe; all ranks refuse when one replica is off."""
        probe = self._probe
        if probe is None or (self._proven and not probe.always):
            return
        engine, trainer = probe.engine(probe.tokens_NL), probe.trainer(probe.tokens_NL)
        diff = torch.nan_to_num((engine.double().cpu() - trainer.double().cpu()).abs(), nan=torch.inf)
        seen = self._transport.gather((float(diff.max()), float(diff.mean())))
        worst = max(range(len(seen)), key=lambda rank: seen[rank])
        if seen[worst][0] > probe.max or max(mean for _, mean in seen) > probe.mean:
            raise CheckFailed(
                f"after the sync of weights the engine on rank {worst} scores the probe batch {seen[worst][0]:.3g} "
                f"(mean {seen[worst][1]:.3g}) away from the trainer (bounds {probe.max:g}, {probe.mean:g}), though "
                "every name and byte arrived: the engine re-packs or computes something else than the trainer"
            )

    def _agree(self, problem: str | None, leaves: str = "the engine refuses prompts") -> None:
        """Raise CheckFailed on every rank as soon as one has a problem."""
        flag = torch.tensor(int(problem is not None), device=self._device)
        if not int(self._transport.sum(flag)):
            return
        found = [f"rank {rank}: {text}" for rank, text in enumerate(self._transport.gather(problem)) if text]
        raise CheckFailed(f"weights were not published, {leaves}: {'; '.join(found[:4])}")


def _refuse_gaps(who: str, gaps: Sequence[str]) -> None:
    if gaps:
        rest = f" and {len(gaps) - 4} more" if len(gaps) > 4 else ""
        raise CheckFailed(f"{who} {', '.join(gaps[:4])}{rest}")


def _distinct(boxes_of_ranks: object) -> list[Box]:
    """Boxes of a replica's ranks, each rectangle once (key-value heads may be held by several)."""
    seen = {(box.name, box.start, box.shape): box for boxes in boxes_of_ranks for box in boxes}  # type: ignore[attr-defined]
    return list(seen.values())


def _extents(plan: Plan, rank: int) -> dict[str, int]:
    """Elements of each local parameter that the plan reads up to."""
    needed: dict[str, int] = {}
    for message in plan.messages:
        if message.source == rank:
            for piece in message.pieces:
                view = piece.source
                last = sum((n - 1) * stride for n, stride in zip(piece.shape, view.strides, strict=True))
                needed[view.param] = max(needed.get(view.param, 0), view.offset + last + 1)
    return needed


def _pack(message: Message, parameters: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[numel]: the pieces end to end, each in row-major order of its HF tensor."""
    flat, at = torch.empty(message.numel, dtype=dtype, device=device), 0
    for piece in message.pieces:
        tensor, view = parameters[piece.source.param].detach().view(dtype), piece.source  # fp32 as words of dtype
        # as_strided takes absolute offsets: parameters may be views into one big buffer
        part = tensor.as_strided(piece.shape, view.strides, tensor.storage_offset() + view.offset)
        flat[at : at + piece.numel].view(piece.shape).copy_(part)
        at += piece.numel
    return flat
