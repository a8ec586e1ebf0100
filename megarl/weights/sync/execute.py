"""Runs one rank's part of a plan: packs, sends, receives and relays messages, round by round.

    round n in flight | packs the messages of round n + 1, and passes the local copies of round n to the callback
    round n arrived   | takes checksums, passes messages to the callback, packs the relays of round n + 1 from them

At most two rounds of buffers are alive at a time, unless the callback keeps them.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from megarl.models.shards import ShardSlice
from megarl.types import CheckFailed
from megarl.weights.checksum import checksum, copy_and_verify, positional_checksum
from megarl.weights.plan import Message, Plan, Transfer, relay_buffer
from megarl.weights.transports import Transport

CPU = torch.device("cpu")
OnBucket = Callable[
    [Message, Tensor], None
]  # a message and its flat buffer; must not raise, as peers are waiting


class Encoder(Protocol):
    """Converts weights to the format in which they move."""

    names: frozenset[str]  # of the HF tensors that it converts

    def encode(self, name: str, start: Sequence[int], values: Tensor) -> Tensor:
        """Returns [start, start + values.shape) of HF tensor `name`, a byte an element."""
        ...


def strided_view(tensor: Tensor, part: ShardSlice, dtype: torch.dtype | None = None) -> Tensor:
    """A view of part of a contiguous `tensor`, as elements of `dtype` (None: its own)."""
    data = tensor.detach().view(dtype or tensor.dtype)
    # as_strided takes absolute offsets, and parameters may be views of one large buffer
    return data.as_strided(part.shape, part.strides, data.storage_offset() + part.offset)


def read_slice(
    tensor: Tensor, part: ShardSlice, dtype: torch.dtype, encoder: Encoder | None
) -> Tensor:
    """Returns a slice as it moves: a view as elements of `dtype`, or what the encoder makes of it."""
    if encoder and part.name in encoder.names:
        return encoder.encode(part.name, part.start, strided_view(tensor, part))
    return strided_view(tensor, part, dtype)


def split_message(message: Message, flat: Tensor) -> Iterator[tuple[Transfer, Tensor]]:
    """Yields each transfer with its part of the buffer `flat` [numel], in the transfer's shape."""
    parts = flat.split([transfer.source.numel for transfer in message.transfers])
    for transfer, part in zip(message.transfers, parts, strict=True):
        yield transfer, part.view(transfer.source.shape)


class PlanExecutor:
    """Executes this rank's messages of a plan."""

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        dtype: torch.dtype,
        device: torch.device,
        encoder: Encoder | None = None,
    ) -> None:
        """`encoder`: of the weights that this rank sends."""
        self.rounds, self.num_messages = plan.lower(transport.rank), len(plan.message_bytes)
        self._transport, self._dtype, self._device, self._encoder = (
            transport,
            dtype,
            device,
            encoder,
        )

    @property
    def messages(self) -> Iterator[Message]:
        """Messages that this rank sends, receives or copies locally, in order."""
        return (message for messages in self.rounds for message in messages)

    @property
    def bytes_arriving(self) -> int:
        """Bytes that this rank receives from others."""
        rank = self._transport.rank
        return self._dtype.itemsize * sum(
            m.numel for m in self.messages if m.receiver == rank != m.sender
        )

    def run(
        self, parameters: Mapping[str, Tensor], on_bucket: OnBucket, *, include_local: bool
    ) -> Tensor:
        """Calls `on_bucket` for each message received and, with `include_local`, for local copies. Returns the
        checksums [2, messages] int64 of those that this rank sent, and received; 0 for others. Raises CheckFailed,
        naming the messages in flight, if a peer is lost."""
        rank = self._transport.rank
        sums = torch.zeros(2, self.num_messages, dtype=torch.int64, device=self._device)
        outgoing = self._pack_round(0, parameters, sums, relays=False)
        for number, messages in enumerate(self.rounds):
            incoming = [(m, self._empty(m)) for m in messages if m.receiver == rank != m.sender]
            wait = self._transport.start(
                {m.receiver: flat for m, flat in outgoing}, {m.sender: flat for m, flat in incoming}
            )
            following = self._pack_round(
                number + 1, parameters, sums, relays=False
            )  # overlaps the round in flight
            for message in messages:
                if include_local and message.sender == message.receiver:
                    on_bucket(message, self.pack(message, parameters))
            try:
                wait()
            except CheckFailed as error:
                raise CheckFailed(
                    f"{error}; in flight: {self._in_flight(number, str(error))}"
                ) from error
            for message, flat in incoming:
                sums[1, message.index] = checksum(flat)
                on_bucket(message, flat)
            arrived = {relay_buffer(m.sender): flat for m, flat in incoming}
            outgoing = following + self._pack_round(
                number + 1, ChainMap(arrived, cast(Any, parameters)), sums, relays=True
            )
        return sums

    def pack(self, message: Message, memory: Mapping[str, Tensor]) -> Tensor:
        """Returns [numel]: the message's transfers end to end, each in row-major order of its HF tensor."""
        flat = self._empty(message)
        for transfer, part in split_message(message, flat):
            encoder = None if transfer.is_relay else self._encoder
            part.copy_(
                read_slice(memory[transfer.source.param], transfer.source, self._dtype, encoder)
            )
        return flat

    def describe(self, message: Message) -> str:
        """Describes a message: number, round, ranks and tensors."""
        return f"message {message.index + 1} of {self.num_messages} (round {message.round + 1}), {message}"

    def _pack_round(
        self, number: int, memory: Mapping[str, Tensor], sums: Tensor, *, relays: bool
    ) -> list[tuple[Message, Tensor]]:
        """Packs the messages that this rank sends in a round: the relays, or all others."""
        messages = self.rounds[number] if number < len(self.rounds) else ()
        sent = (
            m
            for m in messages
            if m.sender == self._transport.rank != m.receiver and m.is_relay == relays
        )
        packed = [(message, self.pack(message, memory)) for message in sent]
        for message, flat in packed:
            sums[0, message.index] = checksum(flat)
        return packed

    def _empty(self, message: Message) -> Tensor:
        return torch.empty(message.numel, dtype=self._dtype, device=self._device)

    def _in_flight(self, number: int, error: str) -> str:
        """Describes the messages that may be lost: those of peers named in `error`, or all of the round."""
        messages = [m for m in self.rounds[number] if m.sender != m.receiver]
        named = [
            m for m in messages if f"rank {m.sender + m.receiver - self._transport.rank} " in error
        ] or messages
        return "; ".join(map(self.describe, named[:4]))


class MemoryReceiver:
    """publish.WeightReceiver into plain tensors on the CPU: `memory` has every `param` of the slices, in elements of
    `dtype`. Messages arrive on `device`."""

    def __init__(
        self,
        slices: Sequence[ShardSlice],
        memory: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> None:
        self.slices, self.memory, self.device, self._dtype = slices, memory, device, dtype
        self.version: int | None = None
        self._loaded: Counter[str] = Counter()  # elements received of each HF tensor

    def begin(self, *, check_placement: bool) -> None:
        self._loaded, self.version = Counter(), None

    def write(self, message: Message, flat: Tensor) -> Tensor:
        wrong = torch.zeros((), dtype=torch.int64, device="cpu")
        for transfer, part in split_message(message, flat.to(CPU)):
            into = transfer.destination
            wrong += copy_and_verify(part, strided_view(self.memory[into.param], into, self._dtype))
            self._loaded[into.name] += into.numel
        return wrong

    def seal(self) -> Mapping[str, int]:
        return self._loaded

    def positional_checksums(self) -> Tensor:
        sums = [
            positional_checksum(strided_view(self.memory[x.param], x, self._dtype), x.start)
            for x in self.slices
        ]
        return (torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device="cpu")).to(
            self.device
        )

    def finish(self, version: int) -> None:
        self.version = version

    def abort(self) -> None:
        self.version = None
