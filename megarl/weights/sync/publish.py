"""Publishes the trainer's weights to the engine, shard to shard, verified every time.

A rank may be a sender, a receiver or both. Every rank builds a Publisher and calls `publish`, in the same order:

    sender (trainer)                                receiver (engine)
    barrier ------------- all ranks, or the absent are named ------------ barrier
    pack, checksum, send, round by round ---------> receive, checksum, stage; relay within the node
    compare checksums --- all ranks refuse together --------------------- compare checksums
                                                    begin: prompts are refused from here on
                                                    write and read back every message
                                                    seal: names and element counts are those expected
    agree ------------------------ waits for the slowest ---------------- agree
    checksum slices ----- placement (first sync, or `probe: always`) ---- checksum slices
    score the probe ----- compared, on the same occasions --------------- score the probe
    report                                          finish(version): prompts are accepted again

If a sync fails before `begin` (a rank is absent or lost, bytes changed, a parameter is missing), the engine keeps its
version, because all that a rank receives is staged: on the device as far as it has room, otherwise in pinned host
memory. Without a version to keep (first sync, sleep level 2), or with `is_atomic=False`, messages are written as they
arrive. If a sync fails after `begin`, the engine has no version and refuses prompts until a sync succeeds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.models.fp8 import SCALE
from megarl.models.shards import (
    ElementSizes,
    ShardSlice,
    as_pairs,
    first_mismatch,
    in_units,
    shapes_in_units,
)
from megarl.platform.device import device_bytes, free_host_bytes, host_bytes
from megarl.types import CheckFailed, PublishReport
from megarl.weights.execute import Encoder, PlanExecutor
from megarl.weights.placement_check import PlacementCheck, slice_checksum, sums_by_tensor
from megarl.weights.plan import Message, Plan, SlicesByRank, find_gaps, first_few, plan_recorded
from megarl.weights.transports import Transport

SPARE_BYTES = (
    2 << 30
)  # of device memory, kept free next to staged messages for the layers that are open at the time
KEEPS = "The engine keeps its previous version"
REFUSES = "The engine refuses prompts until a sync succeeds"


@dataclass(frozen=True)
class WeightFormat:
    """The tensors of the checkpoint and how they move."""

    shapes: Mapping[str, tuple[int, ...]]  # every HF tensor with its full shape
    dtype: torch.dtype
    fp32: frozenset[str] = (
        frozenset()
    )  # HF tensors that are fp32 on both sides, whatever `dtype` is
    fp8: frozenset[str] = (
        frozenset()
    )  # HF tensors that are FP8 in the engine, and `dtype` in the trainer

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a tensor in the trainer."""
        return torch.float32 if name in self.fp32 else self.dtype

    @property
    def sizes(self) -> ElementSizes:
        return ElementSizes(self.dtype.itemsize, self.fp32, self.fp8)

    @property
    def unit(self) -> torch.dtype:
        """The dtype in which the plan counts elements, and in which messages are."""
        return torch.uint8 if self.fp8 else self.dtype

    def in_fp8(self, scales: Mapping[str, tuple[int, ...]]) -> WeightFormat:
        """Returns the format of a model whose weights with `scales` (models.fp8.scale_shapes) are FP8 in the engine."""
        names = frozenset(name.removesuffix(SCALE) for name in scales)
        return WeightFormat({**self.shapes, **scales}, self.dtype, self.fp32.union(scales), names)

    def moved_shapes(self) -> dict[str, tuple[int, ...]]:
        """In elements of `unit`, as the plan counts them."""
        return shapes_in_units(self.shapes, self.sizes)

    def moved_slices(self, slices: Sequence[ShardSlice]) -> list[ShardSlice]:
        return in_units(slices, self.sizes)


@dataclass(frozen=True)
class WeightSender:
    """The trainer's side on one rank."""

    slices: Sequence[ShardSlice]  # where its parameters hold HF tensors
    parameters: Callable[[], Mapping[str, Tensor]]
    encoder: Encoder | None = None  # of what WeightFormat.fp8 names


class WeightReceiver(Protocol):
    """The engine's side on one rank: begin, write ..., seal, finish; abort at any time."""

    device: torch.device
    version: int | None  # None: no weights that a failed sync could spoil

    @property
    def slices(self) -> Sequence[ShardSlice]:
        """The slices that this rank keeps, in elements of the dtype that moves, in the order of the engine's layers."""
        ...

    def begin(self, *, check_placement: bool) -> None:
        """Starts a sync; with `check_placement`, `positional_checksums` is called after `seal`."""

    def write(self, message: Message, flat: Tensor) -> Tensor:
        """Writes the buffer [numel] of a message; returns how many transfers read back differently, int64 scalar."""
        ...

    def seal(self) -> Mapping[str, int]:
        """Returns the elements received of each HF tensor. Raises CheckFailed if a layer is incomplete."""
        ...

    def positional_checksums(self) -> Tensor:
        """Returns [slices] int64: `checksum.positional_checksum` of each slice, read in checkpoint form."""
        ...

    def finish(self, version: int) -> None: ...
    def abort(self) -> None: ...


class Probe(Protocol):
    """Compares log-probs of both sides, because repacking bugs are visible only there."""

    always: bool  # False: in the first sync of a run only

    def check(self) -> None:
        """A collective. Raises CheckFailed, on all ranks, if trainer and engine differ."""


def plan_slices(
    weights: WeightFormat,
    sources: SlicesByRank,
    destinations: SlicesByRank,
    *,
    ranks_per_replica: int,
    round_bytes: int,
    ranks_per_node: int | None = None,
) -> Plan:
    """Plans from the slices of all ranks, without a table; `destinations` are the `slices` of the receivers. Raises
    CheckFailed naming tensors that are incomplete in the trainer or the engine."""
    shapes = weights.moved_shapes()
    sources = [weights.moved_slices(slices) for slices in sources]
    paired = {
        part.name
        for slices in sources
        for part in slices
        if len(part.shape) > len(shapes[part.name])
    }
    destinations = [
        [as_pairs(part) if part.name in paired else part for part in slices]
        for slices in destinations
    ]
    holders, receivers = (
        {"the trainer": sources},
        [rank for rank, slices in enumerate(destinations) if slices],
    )
    for first in range(0, len(receivers), ranks_per_replica):
        ranks = receivers[first : first + ranks_per_replica]
        holders[f"the engine on ranks {ranks[0]}..{ranks[-1]}"] = [
            destinations[rank] for rank in ranks
        ]
    for where, slices in holders.items():
        if gaps := find_gaps(shapes, slices):
            raise CheckFailed(
                f"tensors of {where} do not match the checkpoint's: {first_few(gaps)}"
            )
    sizes = {
        "itemsize": weights.unit.itemsize,
        "round_bytes": round_bytes,
        "ranks_per_node": ranks_per_node,
    }
    try:
        return plan_recorded(sources, destinations, **sizes)
    except ValueError as error:
        raise CheckFailed(f"cannot plan the weight sync: {error}") from None


class Publisher:
    """roles.Weights."""

    span: Callable[[str], AbstractContextManager[Any]] = nullcontext  # of "staging"
    base: Publisher | None = (
        None  # of the frozen weights below adapters: publishes once, before this one
    )

    def __init__(
        self,
        plan: Plan,
        sender: WeightSender | None,
        receiver: WeightReceiver | None,
        transport: Transport,
        weights: WeightFormat,
        *,
        ranks_per_replica: int,
        table: Sequence[ShardSlice]
        | None = None,  # the slices that this rank of the engine keeps, from its table
        probe: Probe | None = None,
        is_atomic: bool = True,
        ranks_per_node: int | None = None,  # None: all ranks are on one node
    ) -> None:
        """A collective. `plan` numbers ranks as `transport` does; a rank that does not send or receive passes None.
        Raises CheckFailed, on all ranks, if the engine's slices differ from its table, or the ranks' plans differ."""
        self.sender = sender or WeightSender((), dict[str, Tensor])
        self.plan, self.receiver, self.transport = plan, receiver, transport
        self.weights, self.probe, self.is_atomic = weights, probe, is_atomic
        self.ranks_per_node = ranks_per_node or transport.world
        self._device = (
            receiver.device if receiver else next(iter(self.sender.parameters().values())).device
        )
        self._pinned = 0  # bytes staged on the host so far: torch keeps them for the next sync
        self.executor = PlanExecutor(
            plan, transport, weights.unit, self._device, self.sender.encoder
        )
        self._is_proven, self._began = False, 0.0
        mismatch = (
            first_mismatch(weights.moved_slices(table), receiver.slices)
            if receiver and table
            else None
        )
        reports = transport.gather((mismatch, plan.fingerprint, receiver is not None))
        mismatches, fingerprints, is_receiver = zip(*reports, strict=True)
        if wrong := [f"rank {rank}: {text}" for rank, text in enumerate(mismatches) if text]:
            raise CheckFailed(
                f"{wrong[0]}: this vLLM lays out weights differently from the versions megarl supports"
            )
        if odd := [
            rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]
        ]:
            raise CheckFailed(
                f"ranks {odd} have a different plan from rank 0; start all ranks with the same config"
            )
        receivers = [rank for rank, is_one in enumerate(is_receiver) if is_one]
        self.placement = PlacementCheck(weights.moved_shapes(), receivers, ranks_per_replica)

    def publish(self, *, version: int) -> PublishReport:
        """Raises CheckFailed, on all ranks, if data is missing or changed; the message gives the engine's state."""
        before: PublishReport | None = None
        if self.base is not None:
            self.base.span = self.span
            before, self.base = self.base.publish(version=version), None
        if self.transfer(version) and self.probe:
            with _stating(REFUSES, self.abort):
                self.probe.check()
        report = self.commit(version)
        sums = ("num_tensors", "bytes_kept", "bytes_received", "seconds") if before else ()
        return replace(
            report, **{name: getattr(before, name) + getattr(report, name) for name in sums}
        )

    def transfer(self, version: int) -> bool:
        """All of a sync but the probe, after which `commit` or `abort` ends it; returns whether the probe is due.
        After a failure, nobody waits for this rank."""
        self._began = time.perf_counter()
        with _stating(KEEPS, self.transport.leave):
            self.transport.barrier(f"the weight sync of version {version}")
            parameters = self.sender.parameters()
            is_staged = self.is_atomic and self._count(
                self.receiver is not None and self.receiver.version is not None
            )
            self._agree(
                self._parameter_fault(parameters) or (self._memory_fault() if is_staged else None)
            )
            staged = self._stage(parameters) if is_staged else None
        prove = not self._is_proven or (self.probe is not None and self.probe.always)
        with _stating(REFUSES, self.abort, self.transport.leave):
            if self.receiver:
                self.receiver.begin(check_placement=prove)
            self._agree(self._write(parameters, staged))
            self._agree(self._seal())
            if prove:
                self._check_placement(parameters)
        return prove

    def abort(self) -> None:
        if self.receiver:
            self.receiver.abort()

    def commit(self, version: int) -> PublishReport:
        """The engine serves `version` from now on."""
        self._is_proven = True
        if self.receiver:
            self.receiver.finish(version)
        sizes = (len(self.weights.shapes), self.plan.bytes_kept, self.plan.bytes_received)
        return PublishReport(
            version, *sizes, verified=True, seconds=time.perf_counter() - self._began
        )

    def _parameter_fault(self, parameters: Mapping[str, Tensor]) -> str | None:
        """Describes a parameter that is missing or differs from the sender's slices."""
        bytes_read: Counter[str] = Counter()
        for part in self.sender.slices:
            expected, tensor = self.weights.dtype_of(part.name), parameters.get(part.param)
            if tensor is None:
                return f"the trainer has no parameter {part.param}"
            bytes_read[part.param] += part.numel * expected.itemsize
            if (
                tensor.dtype != expected
                or tensor.nbytes < bytes_read[part.param]
                or not tensor.is_contiguous()
            ):
                contiguous = "contiguous" if tensor.is_contiguous() else "not contiguous"
                return (
                    f"parameter {part.param} has {tensor.numel()} elements of {tensor.dtype}, {contiguous}; the plan "
                    f"reads {bytes_read[part.param] // expected.itemsize} contiguous elements of {expected}"
                )
        return None

    def _memory_fault(self) -> str | None:
        """Describes a shortage of host memory for staging. All ranks of a node need about as much at once."""
        beyond = self.executor.bytes_arriving - (
            0 if self._device.type == "cpu" else self._device_room()
        )
        needed, free = self.ranks_per_node * (beyond - self._pinned), free_host_bytes()
        if needed <= free:
            return None
        return (
            f"the {self.ranks_per_node} ranks of a node need {needed / 1e9:.1f} GB of host memory to stage weights, "
            f"but only {free / 1e9:.1f} GB are free; add memory, or set sync.atomic=false"
        )

    def _device_room(self) -> int:
        memory = device_bytes(self._device)
        return self.executor.bytes_arriving if memory is None else max(0, memory[0] - SPARE_BYTES)

    def _stage(self, parameters: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Receives and verifies all messages from other ranks; returns message index -> buffer."""
        room, staged = self._device_room(), {}

        def stage(message: Message, flat: Tensor) -> None:
            nonlocal room
            room -= flat.nbytes
            if room < 0:
                flat = (
                    host_bytes(flat.nbytes, self._device)
                    .view(flat.dtype)
                    .copy_(flat, non_blocking=True)
                )
                self._pinned = max(self._pinned, -room)
            staged[message.index] = flat

        with self.span("staging"):
            self._compare(self.executor.run(parameters, stage, include_local=False))
        return staged

    def _write(
        self, parameters: Mapping[str, Tensor], staged: dict[int, Tensor] | None
    ) -> str | None:
        """Writes every message into the engine, on arrival or from `staged`, which it empties; returns the problem."""
        read_back: list[
            tuple[Message, Tensor]
        ] = []  # message, number of transfers that read back differently
        errors: list[str] = []  # reported after all rounds, as peers wait for them

        def write(message: Message, flat: Tensor) -> None:
            if self.receiver and not errors:
                try:
                    read_back.append((message, self.receiver.write(message, flat)))
                except Exception as error:  # noqa: BLE001 (raised on all ranks later)
                    errors.append(
                        f"{self.executor.describe(message)}: {type(error).__name__}: {error}"
                    )

        if staged is None:
            self._compare(self.executor.run(parameters, write, include_local=True))
        else:
            for message in (m for m in self.executor.messages if m.receiver == self.transport.rank):
                flat = staged.pop(message.index, None)
                flat = self.executor.pack(message, parameters) if flat is None else flat
                write(message, flat.to(self._device, non_blocking=True))
        if not errors and read_back:
            counts = torch.stack(
                [count for _, count in read_back]
            ).tolist()  # synchronizes the device once
            wrong = [
                self.executor.describe(m)
                for (m, _), count in zip(read_back, counts, strict=True)
                if count
            ]
            if wrong:
                return f"{len(wrong)} messages differ when read back after writing: {wrong[0]}"
        return errors[0] if errors else None

    def _compare(self, checksums: Tensor) -> None:
        """Raises CheckFailed, on all ranks, if a message did not arrive as it was sent."""
        sent, received = self.transport.sum(checksums)
        changed = set((sent != received).nonzero().flatten().tolist())
        if not changed:
            return
        mine = [
            m
            for m in self.executor.messages
            if m.index in changed and m.receiver == self.transport.rank
        ]
        texts = self.transport.gather([self.executor.describe(message) for message in mine[:4]])
        shown = [text for of_rank in texts for text in of_rank]
        raise CheckFailed(
            f"{len(changed)} of {len(sent)} messages arrived corrupted: {'; '.join(shown[:4])}; "
            "if this happens again, check the network link and the memory of these ranks"
        )

    def _seal(self) -> str | None:
        """Describes tensors whose loaded elements differ from those that this rank keeps."""
        if self.receiver is None:
            return None
        try:
            loaded = self.receiver.seal()
        except CheckFailed as error:
            return str(error)
        kept: Counter[str] = Counter()
        for part in self.receiver.slices:
            kept[part.name] += part.numel
        wrong = sorted(
            name for name in kept.keys() | loaded.keys() if kept[name] != loaded.get(name, 0)
        )
        return (
            f"loaded tensors differ from the expected ones: {', '.join(wrong[:4])}"
            if wrong
            else None
        )

    def _check_placement(self, parameters: Mapping[str, Tensor]) -> None:
        shapes, nothing = (
            self.placement.shapes,
            torch.zeros(0, dtype=torch.int64, device=self._device),
        )
        slices, read = (
            self.weights.moved_slices(self.sender.slices),
            (self.weights.unit, self.sender.encoder),
        )
        checksums = [slice_checksum(part, parameters, shapes[part.name], *read) for part in slices]
        sent = sums_by_tensor(shapes, slices, torch.stack(checksums) if checksums else nothing)
        kept, checksums_kept = (), nothing
        if self.receiver:
            kept, checksums_kept = self.receiver.slices, self.receiver.positional_checksums()
        self.placement.compare(self.transport, sent, sums_by_tensor(shapes, kept, checksums_kept))

    def _agree(self, problem: str | None) -> None:
        """Raises CheckFailed on every rank if any has a problem."""
        if self._count(problem is not None):
            problems = [
                f"rank {rank}: {text}"
                for rank, text in enumerate(self.transport.gather(problem))
                if text
            ]
            raise CheckFailed(f"weights were not published: {'; '.join(problems[:4])}")

    def _count(self, flag: bool) -> int:
        return int(self.transport.sum(torch.tensor(int(flag), device=self._device)))


@contextmanager
def _stating(outcome: str, *undo: Callable[[], None]) -> Iterator[None]:
    """Calls `undo` on a failure, and appends the resulting state of the engine to a CheckFailed."""
    try:
        yield
    except BaseException as error:
        for step in undo:
            step()
        if isinstance(error, CheckFailed):
            raise CheckFailed(f"{error}. {outcome}") from error
        raise
