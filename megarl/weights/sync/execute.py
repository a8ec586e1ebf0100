"""Runs one rank's part of a plan: packs, sends, receives and relays messages, round by round.

    round n in flight | packs the messages of round n + 1, and passes the local copies of round n
                        to the callback
    round n arrived   | computes checksums, passes messages to the callback, and packs the relays of
                        round n + 1 from them

At most two rounds of buffers are alive at a time, unless the callback keeps them: `receive` does so
until all ranks have verified their messages."""

from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from megarl.models.shape import Shape
from megarl.models.shards import ShardSlice, Slices, without_pairs
from megarl.platform.device import device_bytes, free_host_bytes, host_bytes
from megarl.types import CheckFailed
from megarl.weights.plan.plan import Message, Plan, Transfer, relay_buffer
from megarl.weights.sync.checksum import checksums, positional_checksum
from megarl.weights.sync.copies import copy_all, copy_and_verify
from megarl.weights.sync.transports import Transport

CPU = torch.device("cpu")
SPARE_BYTES = 2 << 30  # device memory for the layers that are open while messages are written
Parameters = Mapping[str, Tensor]  # by name
# a message and its flat buffer; must not raise, as peers are waiting
OnBucket = Callable[[Message, Tensor], None]


class Encoder(Protocol):
    """Converts weights to the format in which they move."""

    names: frozenset[str]  # HF tensors that it converts

    def encode(self, part: ShardSlice, parameter: Tensor) -> Tensor:
        """Returns the encoded bytes, uint8 of `part.shape`, of a slice counted in bytes."""
        ...


def strided_view(tensor: Tensor, part: ShardSlice, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a view of `part` in a contiguous `tensor`, as `dtype` (None: the tensor's dtype)."""
    data = tensor.detach()
    if dtype is not None and dtype != data.dtype:
        data = data.view(dtype)
    # as_strided takes absolute offsets, and parameters may be views of one large buffer
    return data.as_strided(part.shape, part.strides, data.storage_offset() + part.offset)


def read_slice(
    tensor: Tensor,
    part: ShardSlice,
    dtype: torch.dtype,
    encoder: Encoder | None,
) -> Tensor:
    """Returns a slice as it moves: encoded if the encoder converts its tensor, otherwise a view as
    `dtype`."""
    if encoder and part.name in encoder.names:
        return encoder.encode(part, tensor)
    return strided_view(tensor, part, dtype)


def slice_checksum(
    part: ShardSlice,
    parameters: Parameters,
    shape: Shape,
    dtype: torch.dtype,
    encoder: Encoder | None = None,
) -> Tensor:
    """Returns the positional checksum of a slice of an HF tensor of `shape`, read from its
    parameter."""
    view = read_slice(parameters[part.param], part, dtype, encoder)
    start, size = without_pairs(part, len(shape))
    return positional_checksum(view.reshape(size), start)


def split_message(message: Message, flat: Tensor) -> Iterator[tuple[Transfer, Tensor]]:
    """Yields each transfer with its part of the buffer `flat` [numel], in the transfer's shape."""
    parts = flat.split([transfer.source.numel for transfer in message.transfers])
    for transfer, part in zip(message.transfers, parts, strict=True):
        yield transfer, part.view(transfer.source.shape)


def add_checksums(sums: Tensor, buckets: Sequence[tuple[Message, Tensor]]) -> None:
    """Sets the checksums of messages in `sums` [messages of the plan]."""
    if buckets:
        found = checksums([flat for _, flat in buckets])
        places = [sums[message.index] for message, _ in buckets]
        torch._foreach_copy_(places, found.unbind())  # type: ignore[attr-defined]


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
        """`encoder` converts weights that this rank sends."""
        self.rounds = plan.lower(transport.rank)
        self.num_messages = len(plan.message_bytes)
        self._transport = transport
        self._dtype = dtype
        self._device = device
        self._encoder = encoder
        self._pinned = 0  # most bytes staged on the host so far; torch caches them for later syncs

    @property
    def messages(self) -> Iterator[Message]:
        """Messages that this rank sends, receives or copies locally, in order."""
        return chain.from_iterable(self.rounds)

    @property
    def bytes_arriving(self) -> int:
        """Bytes that this rank receives from other ranks."""
        return self._dtype.itemsize * sum(
            m.numel for m in self.messages if m.receiver == self._transport.rank != m.sender
        )

    def run(
        self,
        parameters: Parameters,
        on_bucket: OnBucket,
        *,
        include_local: bool,
    ) -> Tensor:
        """Calls `on_bucket` for each message received and, with `include_local`, for local copies.
        Returns checksums, [2, messages] int64, of the messages that this rank sent (row 0) and
        received (row 1), 0 for all others. Raises CheckFailed, naming the messages in flight, if a
        peer is lost."""
        rank = self._transport.rank
        sums = torch.zeros(2, self.num_messages, dtype=torch.int64, device=self._device)
        outgoing = self._pack_round(0, parameters, sums, relays=False)
        for number, messages in enumerate(self.rounds):
            incoming = [(m, self._empty(m)) for m in messages if m.receiver == rank != m.sender]
            wait = self._transport.start(
                {message.receiver: flat for message, flat in outgoing},
                {message.sender: flat for message, flat in incoming},
            )
            # packing overlaps the round in flight, whose buffers `outgoing` keeps alive
            following = self._pack_round(number + 1, parameters, sums, relays=False)
            for message in messages:
                if include_local and message.sender == message.receiver:
                    on_bucket(message, self.pack(message, parameters))
            try:
                wait()
            except CheckFailed as error:
                raise CheckFailed(
                    f"{error}; in flight: {self._in_flight(number, str(error))}"
                ) from error
            add_checksums(sums[1], incoming)
            for message, flat in incoming:
                on_bucket(message, flat)
            arrived = {relay_buffer(message.sender): flat for message, flat in incoming}
            memory = ChainMap(arrived, cast(Any, parameters))
            outgoing = following + self._pack_round(number + 1, memory, sums, relays=True)
        return sums

    def device_room(self) -> int:
        memory = device_bytes(self._device)
        return self.bytes_arriving if memory is None else max(0, memory[0] - SPARE_BYTES)

    def memory_fault(self, ranks_per_node: int) -> str | None:
        """Describes a shortage of host memory for `receive`; None if there is none. Assumes that
        all ranks of a node need as much as this one, at once."""
        beyond = self.bytes_arriving
        if self._device.type != "cpu":
            beyond -= self.device_room()
        needed = ranks_per_node * (beyond - self._pinned)
        free = free_host_bytes()
        if needed <= free:
            return None
        return (
            f"the {ranks_per_node} ranks of a node need {needed / 1e9:.1f} GB of host memory "
            f"to stage weights, but only {free / 1e9:.1f} GB are free; add memory, or set "
            "sync.atomic=false"
        )

    def receive(self, parameters: Parameters) -> tuple[dict[int, Tensor], Tensor]:
        """Receives all messages from other ranks, on the device while it has room, otherwise in
        pinned host memory. Returns {message index: buffer} and the checksums of `run`."""
        room = self.device_room()
        staged = {}

        def stage(message: Message, flat: Tensor) -> None:
            nonlocal room
            room -= flat.nbytes
            if room < 0:
                host = host_bytes(flat.nbytes, self._device).view(flat.dtype)
                flat = host.copy_(flat, non_blocking=True)
                self._pinned = max(self._pinned, -room)
            staged[message.index] = flat

        return staged, self.run(parameters, stage, include_local=False)

    def pack(self, message: Message, memory: Parameters) -> Tensor:
        """Returns the message's buffer, [numel]: its transfers end to end, each in row-major order
        of its HF tensor."""
        return self._pack([message], memory)[0]

    def _pack(self, messages: Sequence[Message], memory: Parameters) -> list[Tensor]:
        flats = [self._empty(message) for message in messages]
        into = []
        pieces = []
        for transfer, part in chain.from_iterable(map(split_message, messages, flats)):
            source = transfer.source
            tensor = memory[source.param]
            encoder = self._encoder
            if encoder and source.name in encoder.names and not transfer.is_relay:
                part.copy_(encoder.encode(source, tensor))
            else:
                into.append(part)
                pieces.append(strided_view(tensor, source, self._dtype))
        copy_all(into, pieces)
        return flats

    def describe(self, message: Message) -> str:
        """Returns a message's number, round, ranks and tensors, for errors."""
        return (
            f"message {message.index + 1} of {self.num_messages} "
            f"(round {message.round + 1}), {message}"
        )

    def _pack_round(
        self,
        number: int,
        memory: Parameters,
        sums: Tensor,
        *,
        relays: bool,
    ) -> list[tuple[Message, Tensor]]:
        """Packs the messages that this rank sends in round `number`, if there is such a round: with
        `relays` only relays, otherwise all other messages."""
        messages = [
            message
            for message in chain.from_iterable(self.rounds[number : number + 1])
            if message.sender == self._transport.rank != message.receiver
            and message.is_relay == relays
        ]
        packed = list(zip(messages, self._pack(messages, memory), strict=True))
        add_checksums(sums[0], packed)
        return packed

    def _empty(self, message: Message) -> Tensor:
        return torch.empty(message.numel, dtype=self._dtype, device=self._device)

    def _in_flight(self, number: int, error: str) -> str:
        """Describes up to four messages that may be lost: those of peers named in `error`, or any
        of the round."""
        messages = [m for m in self.rounds[number] if m.sender != m.receiver]
        rank = self._transport.rank
        named = [m for m in messages if f"rank {m.sender + m.receiver - rank} " in error]
        return "; ".join(map(self.describe, (named or messages)[:4]))


@dataclass
class MemoryReceiver:
    """A publish.WeightReceiver that writes into plain tensors on the CPU."""

    slices: Slices
    memory: Parameters  # has every `param` of the slices
    dtype: torch.dtype  # of the elements that move
    device: torch.device = CPU  # where messages arrive
    version: int | None = None
    loaded: Counter[str] = field(default_factory=Counter)  # elements received per HF tensor

    def begin(self, *, check_placement: bool) -> None:
        self.loaded = Counter()
        self.version = None

    def write(self, message: Message, flat: Tensor) -> Tensor:
        flat = flat.to(CPU)
        into = [transfer.destination for transfer in message.transfers]
        for part in into:
            self.loaded[part.name] += part.numel
        parts = [part for _, part in split_message(message, flat)]
        return copy_and_verify(flat, parts, list(map(self._view, into)))

    def _view(self, part: ShardSlice) -> Tensor:
        return strided_view(self.memory[part.param], part, self.dtype)

    def seal(self) -> Mapping[str, int]:
        return self.loaded

    def positional_checksums(self) -> Tensor:
        sums = torch.zeros(len(self.slices), dtype=torch.int64, device="cpu")
        for number, part in enumerate(self.slices):
            sums[number] = positional_checksum(self._view(part), part.start)
        return sums.to(self.device)

    def finish(self, version: int) -> None:
        self.version = version

    def abort(self) -> None:
        self.version = None
