"""The rounds of a plan, run: pack, send, receive, copy on, with a checksum of every bucket that travels.

    round n in flight | round n + 1 is packed, what stays of round n is taken
    round n arrived   | checksums, taken, and copied into the buckets of round n + 1 that go on within the node

Two rounds of buckets exist at a time, unless whoever takes them keeps them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from megarl.types import CheckFailed
from megarl.weights.checksum import checksum
from megarl.weights.plan import Message, Plan, arrived
from megarl.weights.transports import Transport

__all__ = ["BucketChecksums", "OnBucket", "PlanExecutor"]

OnBucket = Callable[[int, Tensor], None]  # number of a message, its bucket; must not raise: peers wait for later rounds


@dataclass(frozen=True)
class BucketChecksums:
    """Checksums [messages] int64: of what this rank sent, of what arrived here; 0 where it did neither."""

    sent: Tensor
    received: Tensor


@dataclass(frozen=True)
class _Packed:
    """Buckets by number of message."""

    outgoing: dict[int, Tensor] = field(default_factory=dict)
    staying: dict[int, Tensor] = field(default_factory=dict)


class PlanExecutor:
    """Messages are counted over all rounds."""

    def __init__(self, plan: Plan, transport: Transport, dtype: torch.dtype, device: torch.device) -> None:
        self.plan = plan
        self._transport = transport
        self._dtype = dtype
        self._device = device
        self._first = [0, *accumulate(len(round_) for round_ in plan.rounds)]  # [rounds + 1] message each begins with

    @property
    def bytes_arriving(self) -> int:
        """From other ranks, at this one."""
        rank = self._transport.rank
        return self.plan.itemsize * sum(m.numel for m in self.plan.messages if m.destination == rank != m.source)

    def kept(self) -> Iterator[int]:
        """The messages to this rank in order, those from itself among them."""
        rank = self._transport.rank
        return (index for index, message in enumerate(self.plan.messages) if message.destination == rank)

    def run(self, parameters: Mapping[str, Tensor], take: OnBucket, *, staying: bool) -> BucketChecksums:
        """`staying`: also take what travels nowhere.

        Raises CheckFailed, naming what was in flight, when a peer is lost.
        """
        sums = BucketChecksums(*torch.zeros(2, len(self.plan.messages), dtype=torch.int64, device=self._device))
        packed = self._pack_round(0, parameters, sums, staying)
        for number in range(len(self.plan.rounds)):
            current, incoming = packed, self._room(number)
            wait = self._transport.start(
                {self.plan.messages[index].destination: flat for index, flat in current.outgoing.items()},
                {self.plan.messages[index].source: flat for index, flat in incoming.items()},
            )
            packed = self._pack_round(number + 1, parameters, sums, staying)  # while this round is in flight
            for index, flat in current.staying.items():
                take(index, flat)
            try:
                wait()
            except CheckFailed as error:
                raise CheckFailed(f"{error}; {self._in_flight(number, str(error))}") from error
            for index, flat in incoming.items():
                sums.received[index] = checksum(flat)
                take(index, flat)
            self._pack_forwards(number + 1, parameters, incoming, packed, sums)
        return sums

    def pack(self, index: int, parameters: Mapping[str, Tensor]) -> Tensor:
        """[numel]: the pieces of a message end to end, each in row-major order of its HF tensor."""
        message, at = self.plan.messages[index], 0
        flat = torch.empty(message.numel, dtype=self._dtype, device=self._device)
        for piece in message.pieces:
            tensor, view = parameters[piece.source.param].detach().view(self._dtype), piece.source  # fp32 as words
            # as_strided takes absolute offsets: parameters may be views into one big buffer
            part = tensor.as_strided(piece.shape, view.strides, tensor.storage_offset() + view.offset)
            flat[at : at + piece.numel].view(piece.shape).copy_(part)
            at += piece.numel
        return flat

    def bucket(self, index: int) -> str:
        """In words: its number, its round, its ranks and its tensors."""
        number = bisect_right(self._first, index)
        return f"bucket {index + 1} of {len(self.plan.messages)} (round {number}), {self.plan.messages[index]}"

    def _pack_round(
        self, number: int, parameters: Mapping[str, Tensor], sums: BucketChecksums, staying: bool
    ) -> _Packed:
        """What this rank sends of its own in a round, and what stays here; nothing behind the last round."""
        packed = _Packed()
        for index, message in self._from_here(number):
            if message.source == message.destination:
                if staying:
                    packed.staying[index] = self.pack(index, parameters)
            elif not message.is_relay:
                packed.outgoing[index] = self.pack(index, parameters)
                sums.sent[index] = checksum(packed.outgoing[index])
        return packed

    def _pack_forwards(
        self,
        number: int,
        parameters: Mapping[str, Tensor],
        came: Mapping[int, Tensor],  # in the round before
        packed: _Packed,
        sums: BucketChecksums,
    ) -> None:
        memory = {**parameters, **{arrived(self.plan.messages[index].source): flat for index, flat in came.items()}}
        for index, message in self._from_here(number):
            if message.is_relay:
                packed.outgoing[index] = self.pack(index, memory)
                sums.sent[index] = checksum(packed.outgoing[index])

    def _room(self, number: int) -> dict[int, Tensor]:
        """Message -> room for it, of those that come to this rank from another."""
        rank = self._transport.rank
        return {
            index: torch.empty(message.numel, dtype=self._dtype, device=self._device)
            for index, message in self._of_round(number)
            if message.destination == rank != message.source
        }

    def _from_here(self, number: int) -> Iterator[tuple[int, Message]]:
        return ((index, m) for index, m in self._of_round(number) if m.source == self._transport.rank)

    def _of_round(self, number: int) -> Iterator[tuple[int, Message]]:
        messages = self.plan.rounds[number] if number < len(self.plan.rounds) else ()
        return enumerate(messages, self._first[number])

    def _in_flight(self, number: int, said: str) -> str:
        """The buckets that a lost transfer may have been: those of the peers it names, else all of this rank's."""
        rank = self._transport.rank
        mine = [
            (i, m) for i, m in self._of_round(number) if rank in (m.source, m.destination) and m.source != m.destination
        ]
        named = [(i, m) for i, m in mine if f"rank {m.source + m.destination - rank} " in said] or mine
        return f"in flight: {'; '.join(self.bucket(index) for index, _ in named[:4])}"
