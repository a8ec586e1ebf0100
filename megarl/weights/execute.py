"""Runs one rank's part of a plan: packs, sends, receives and relays messages, round by round.

    round n in flight | messages of round n + 1 are packed; what stays on this rank in round n is handed over
    round n arrived   | checksums are taken, messages handed over, and relays of round n + 1 packed from them

Buffers of two rounds exist at a time, unless the callback keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.models.shards import ShardSlice
from megarl.types import CheckFailed
from megarl.weights.checksum import checksum
from megarl.weights.plan import Message, Plan, Transfer, View, relay_buffer
from megarl.weights.transports import Transport

__all__ = ["BucketChecksums", "OnBucket", "PlanExecutor", "split_message", "strided_view"]

OnBucket = Callable[[Message, Tensor], None]  # a message and its flat buffer; must not raise, as peers wait for rounds


@dataclass(frozen=True)
class BucketChecksums:
    """[messages of the plan] int64: checksums of what this rank sent and of what arrived here, 0 elsewhere."""

    sent: Tensor
    received: Tensor


def strided_view(tensor: Tensor, where: View | ShardSlice, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Part of a contiguous `tensor`, as elements of `dtype` (16-bit ones where an fp32 tensor is among 16-bit ones)."""
    data = tensor.detach().view(dtype)
    # as_strided takes absolute offsets, and parameters may be views of one large buffer
    return data.as_strided(shape, where.strides, data.storage_offset() + where.offset)


def split_message(message: Message, flat: Tensor) -> Iterator[tuple[Transfer, Tensor]]:
    """Each transfer with its part of the buffer `flat` [numel], in the transfer's shape."""
    parts = flat.split([transfer.numel for transfer in message.transfers])
    for transfer, part in zip(message.transfers, parts, strict=True):
        yield transfer, part.view(transfer.shape)


class PlanExecutor:
    """Holds this rank's messages only."""

    def __init__(self, plan: Plan, transport: Transport, dtype: torch.dtype, device: torch.device) -> None:
        self.rounds = plan.lower(transport.rank).rounds
        self.num_messages = len(plan.message_bytes)
        self._transport = transport
        self._dtype = dtype
        self._device = device

    @property
    def messages(self) -> Iterator[Message]:
        """Those that this rank sends, receives or keeps, in order."""
        return (message for messages in self.rounds for message in messages)

    @property
    def bytes_arriving(self) -> int:
        """Received from other ranks."""
        rank = self._transport.rank
        return self._dtype.itemsize * sum(m.numel for m in self.messages if m.receiver == rank != m.sender)

    def run(self, parameters: Mapping[str, Tensor], on_bucket: OnBucket, *, include_local: bool) -> BucketChecksums:
        """Hands each message received to `on_bucket`; with `include_local` also those this rank keeps to itself.

        Raises CheckFailed, naming the messages in flight, when a peer is lost.
        """
        rank = self._transport.rank
        sums = BucketChecksums(*torch.zeros(2, self.num_messages, dtype=torch.int64, device=self._device))
        outgoing = self._pack_round(0, parameters, sums, relays=False)
        for number, messages in enumerate(self.rounds):
            incoming = [(m, self._empty(m)) for m in messages if m.receiver == rank != m.sender]
            wait = self._transport.start(
                {m.receiver: flat for m, flat in outgoing}, {m.sender: flat for m, flat in incoming}
            )
            following = self._pack_round(number + 1, parameters, sums, relays=False)  # while this round is in flight
            for message in messages:
                if include_local and message.sender == message.receiver:
                    on_bucket(message, self.pack(message, parameters))
            try:
                wait()
            except CheckFailed as error:
                raise CheckFailed(f"{error}; in flight: {self._in_flight(number, str(error))}") from error
            for message, flat in incoming:
                sums.received[message.index] = checksum(flat)
                on_bucket(message, flat)
            arrived = {relay_buffer(m.sender): flat for m, flat in incoming}
            outgoing = following + self._pack_round(number + 1, {**parameters, **arrived}, sums, relays=True)
        return sums

    def pack(self, message: Message, memory: Mapping[str, Tensor]) -> Tensor:
        """[numel]: the message's transfers end to end, each in row-major order of its HF tensor."""
        flat = self._empty(message)
        for transfer, part in split_message(message, flat):
            part.copy_(strided_view(memory[transfer.source.param], transfer.source, transfer.shape, self._dtype))
        return flat

    def describe(self, message: Message) -> str:
        """Its number, round, ranks and tensors."""
        return f"message {message.index + 1} of {self.num_messages} (round {message.round + 1}), {message}"

    def _pack_round(
        self, number: int, memory: Mapping[str, Tensor], sums: BucketChecksums, *, relays: bool
    ) -> list[tuple[Message, Tensor]]:
        """What this rank sends in a round: either what it relays, or the rest."""
        messages = self.rounds[number] if number < len(self.rounds) else ()
        sent = (m for m in messages if m.sender == self._transport.rank != m.receiver and m.is_relay == relays)
        packed = [(message, self.pack(message, memory)) for message in sent]
        for message, flat in packed:
            sums.sent[message.index] = checksum(flat)
        return packed

    def _empty(self, message: Message) -> Tensor:
        return torch.empty(message.numel, dtype=self._dtype, device=self._device)

    def _in_flight(self, number: int, error: str) -> str:
        """The messages that a lost transfer may have carried: those of the peers it names, else all of this rank's."""
        messages = [m for m in self.rounds[number] if m.sender != m.receiver]
        named = [m for m in messages if f"rank {m.sender + m.receiver - self._transport.rank} " in error] or messages
        return "; ".join(map(self.describe, named[:4]))
