"""Publishes the trainer's weights to the engine, shard to shard, verified every time.

A rank may be a sender, a receiver or both. Every rank builds a Publisher and calls `publish`, in
the same order:

    sender (trainer)                                receiver (engine)
    barrier ------------- all ranks; errors name the missing ------------ barrier
    pack, checksum, send, round by round ---------> receive, checksum, stage; relay within the node
    compare checksums --- all ranks raise together ---------------------- compare checksums
                                                    begin: prompts are refused from here on
                                                    write and read back every message
                                                    seal: names and element counts are complete
    agree ------------------------ waits for the slowest ---------------- agree
    checksum slices ----- placement (first sync, or `probe: always`) ---- checksum slices
    score the probe ----- compared, on the same occasions --------------- score the probe
    report                                          finish(version): prompts are accepted again

If a sync fails before `begin` (a rank is absent or lost, bytes changed, a parameter is missing),
the engine keeps its version, because received messages are staged: on the device while it has room,
otherwise in pinned host memory. If there is no version to keep (first sync, sleep level 2), or with
`is_atomic=False`, messages are written as they arrive. If a sync fails after `begin`, the engine
has no version and refuses prompts until a sync succeeds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress, islice
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.models.formats import BlockFormat
from megarl.models.shape import Shape
from megarl.models.shards import (
    ElementSizes,
    ShardSlice,
    Slices,
    as_pairs,
    first_mismatch,
    in_units,
    whole_tensor,
)
from megarl.types import CheckFailed, PublishReport
from megarl.weights.encode.quantize import DTYPES, PLAIN, Storage
from megarl.weights.plan.plan import (
    Message,
    Plan,
    SlicesByRank,
    find_gaps,
    first_few,
    plan_recorded,
)
from megarl.weights.plan.tables import by_replica
from megarl.weights.sync.execute import Encoder, Parameters, PlanExecutor, slice_checksum
from megarl.weights.sync.placement import check_placement, sums_by_tensor
from megarl.weights.sync.transports import Transport

KEEPS = "The engine keeps its previous version"
REFUSES = "The engine refuses prompts until a sync succeeds"


@dataclass(frozen=True)
class WeightFormat:
    """The HF tensors that a sync moves, and the dtype or block format of each."""

    shapes: Mapping[str, Shape]  # every HF tensor with its full shape
    dtype: torch.dtype
    # HF tensors that are fp32 in trainer and engine, whatever `dtype` is
    fp32: frozenset[str] = frozenset()
    storage: Storage = PLAIN  # how the engine stores weights that are `dtype` in the trainer

    def in_blocks(self, fmt: BlockFormat, weights: Mapping[str, Shape]) -> WeightFormat:
        """Returns this format with `weights` (HF name -> shape) stored in `fmt` by the engine."""
        scales = {name + fmt.scale: fmt.grid(*shape) for name, shape in weights.items()}
        storage = Storage(fmt, frozenset(weights))
        return replace(self, shapes={**self.shapes, **scales}, storage=storage)

    @cached_property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Trainer dtypes of the tensors and computed scales whose dtype is not `dtype`."""
        fmt = self.storage.format
        scales = (name + fmt.scale for name in self.storage.names)
        dtypes = dict.fromkeys(self.fp32, torch.float32)
        return dtypes | dict.fromkeys(scales, DTYPES[fmt.scale_dtype])

    def dtype_of(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor in the trainer."""
        return self.dtypes.get(name, self.dtype)

    @cached_property
    def sizes(self) -> ElementSizes:
        bits = {name: 8 * dtype.itemsize for name, dtype in self.dtypes.items()}
        bits |= dict.fromkeys(self.storage.names, self.storage.format.bits)
        return ElementSizes(8 * self.dtype.itemsize, bits)

    @property
    def unit(self) -> torch.dtype:
        """The dtype of messages, whose elements are the transfer elements of the plan."""
        return torch.uint8 if self.storage.names else self.dtype

    def moved_shapes(self) -> dict[str, Shape]:
        """Returns the shape of every HF tensor in transfer elements (`unit`)."""
        tensors = [whole_tensor(name, shape) for name, shape in self.shapes.items()]
        return {part.name: part.shape for part in self.moved_slices(tensors)}

    def moved_slices(self, slices: Slices) -> list[ShardSlice]:
        return in_units(slices, self.sizes)


@dataclass(frozen=True)
class WeightSender:
    """The trainer's side on one rank."""

    slices: Slices  # slices of HF tensors in this rank's parameters
    parameters: Callable[[], Parameters]
    encoder: Encoder | None = None  # encodes the weights in WeightFormat.storage


class WeightReceiver(Protocol):
    """The engine's side on one rank: begin, write ..., seal, finish; abort at any time."""

    device: torch.device
    version: int | None  # None: there are no weights that a failed sync could spoil

    @property
    def slices(self) -> Slices:
        """The slices that this rank stores, in transfer elements, in the order of the engine's
        layers."""
        ...

    def begin(self, *, check_placement: bool) -> None:
        """Starts a sync; with `check_placement`, `positional_checksums` is called after `seal`."""

    def write(self, message: Message, flat: Tensor) -> Tensor:
        """Writes the buffer [numel] of a message. Returns True (bool scalar) if part of it reads
        back differently."""
        ...

    def seal(self) -> Mapping[str, int]:
        """Returns the number of elements received per HF tensor. Raises CheckFailed if a layer is
        incomplete."""
        ...

    def positional_checksums(self) -> Tensor:
        """Returns [slices] int64: `checksum.positional_checksum` of each slice, read in checkpoint
        form."""
        ...

    def finish(self, version: int) -> None: ...
    def abort(self) -> None: ...


class Probe(Protocol):
    """Compares log-probs of trainer and engine, because repacking bugs are visible only there."""

    always: bool  # False: only the first sync of a run is probed

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
    """Returns the plan for the slices of all ranks, without a table. `destinations` are the
    `slices` of the receivers. Raises CheckFailed naming tensors that are incomplete in the trainer
    or the engine."""
    shapes = weights.moved_shapes()
    sources = [weights.moved_slices(slices) for slices in sources]
    paired = {
        part.name
        for part in chain.from_iterable(sources)
        if len(part.shape) > len(shapes[part.name])
    }
    destinations = [
        [as_pairs(part) if part.name in paired else part for part in slices]
        for slices in destinations
    ]
    holders = {"the trainer": sources}
    receivers = [rank for rank, slices in enumerate(destinations) if slices]
    for ranks in by_replica(receivers, ranks_per_replica):
        where = f"the engine on ranks {ranks[0]}..{ranks[-1]}"
        holders[where] = [destinations[rank] for rank in ranks]
    for where, slices in holders.items():
        gaps = find_gaps(shapes, slices)
        if gaps:
            raise CheckFailed(
                f"tensors of {where} do not match the checkpoint's: {first_few(gaps)}"
            )
    try:
        return plan_recorded(
            sources,
            destinations,
            itemsize=weights.unit.itemsize,
            round_bytes=round_bytes,
            ranks_per_replica=ranks_per_replica,
            ranks_per_node=ranks_per_node,
        )
    except ValueError as error:
        raise CheckFailed(f"cannot plan the weight sync: {error}") from None


class Publisher:
    """Implements roles.Weights."""

    span: Callable[[str], AbstractContextManager[Any]] = nullcontext  # times "staging"
    # publisher of the frozen weights under LoRA adapters; runs once, before the first sync
    base: Publisher | None = None

    def __init__(
        self,
        plan: Plan,
        sender: WeightSender | None,
        receiver: WeightReceiver | None,
        transport: Transport,
        weights: WeightFormat,
        *,
        table: Slices | None = None,  # slices of this engine rank, according to its table
        probe: Probe | None = None,
        is_atomic: bool = True,
    ) -> None:
        """A collective. The ranks of `plan` are those of `transport`. A rank that does not send
        passes `sender=None`; a rank that does not receive passes `receiver=None`. Raises
        CheckFailed, on all ranks, if the engine's slices differ from its table, or if the ranks'
        plans differ."""
        self.sender = sender or WeightSender((), dict[str, Tensor])
        self.plan = plan
        self.receiver = receiver
        self.transport = transport
        self.weights = weights
        self.probe = probe
        self.is_atomic = is_atomic
        self._is_proven = False
        self._began = 0.0
        mismatch = None
        if receiver:
            self._device = receiver.device
            if table:
                mismatch = first_mismatch(weights.moved_slices(table), receiver.slices)
        else:
            self._device = next(iter(self.sender.parameters().values())).device
        self.executor = PlanExecutor(
            plan, transport, weights.unit, self._device, self.sender.encoder
        )
        reports = transport.gather((mismatch, plan.fingerprint))
        mismatches, fingerprints = zip(*reports, strict=True)
        for rank, text in enumerate(mismatches):
            if text:
                raise CheckFailed(
                    f"rank {rank}: {text}: this vLLM lays out weights differently from the "
                    "versions megarl supports"
                )
        others = [rank for rank, text in enumerate(fingerprints) if text != fingerprints[0]]
        if others:
            raise CheckFailed(
                f"ranks {others} have a different plan from rank 0; start all ranks with the same "
                "config"
            )

    def publish(self, *, version: int) -> PublishReport:
        """Syncs the weights to the engine as `version`. Raises CheckFailed, on all ranks, if data
        is missing or corrupted; the error message gives the engine's state."""
        before = None
        if self.base is not None:
            self.base.span = self.span
            before = self.base.publish(version=version)
            self.base = None
        if self.transfer(version) and self.probe:
            with _engine_state_in_error(REFUSES, self.abort):
                self.probe.check()
        report = self.commit(version)
        if before is None:
            return report
        return replace(
            report,
            num_tensors=before.num_tensors + report.num_tensors,
            bytes_kept=before.bytes_kept + report.bytes_kept,
            bytes_received=before.bytes_received + report.bytes_received,
            seconds=before.seconds + report.seconds,
        )

    def transfer(self, version: int) -> bool:
        """Runs a sync up to the probe; `commit` or `abort` must follow. Returns True if the probe
        is due. After a failure, no peer waits for this rank."""
        self._began = time.perf_counter()
        with _engine_state_in_error(KEEPS, self.transport.leave):
            self.transport.barrier(f"the weight sync of version {version}")
            parameters = self.sender.parameters()
            has_version = self.receiver is not None and self.receiver.version is not None
            is_staged = self.is_atomic and self._count(has_version)
            problem = self._parameter_fault(parameters)
            if is_staged:
                problem = problem or self.executor.memory_fault(self.plan.placement.ranks_per_node)
            self._raise_on_all_ranks(problem)
            staged = self._stage(parameters) if is_staged else None
        prove = not self._is_proven or (self.probe is not None and self.probe.always)
        with _engine_state_in_error(REFUSES, self.abort, self.transport.leave):
            if self.receiver:
                self.receiver.begin(check_placement=prove)
            self._raise_on_all_ranks(self._write(parameters, staged))
            self._raise_on_all_ranks(self._seal())
            if prove:
                self._check_placement(parameters)
        return prove

    def abort(self) -> None:
        if self.receiver:
            self.receiver.abort()

    def commit(self, version: int) -> PublishReport:
        """Ends a sync; the engine serves `version` from then on."""
        self._is_proven = True
        if self.receiver:
            self.receiver.finish(version)
        return PublishReport(
            version,
            num_tensors=len(self.weights.shapes),
            bytes_kept=self.plan.bytes_kept,
            bytes_received=self.plan.bytes_received,
            verified=True,
            seconds=time.perf_counter() - self._began,
        )

    def _parameter_fault(self, parameters: Parameters) -> str | None:
        """Describes the first parameter that is missing or does not match the sender's slices."""
        bytes_read = Counter()
        for part in self.sender.slices:
            expected = self.weights.dtype_of(part.name)
            tensor = parameters.get(part.param)
            if tensor is None:
                return f"the trainer has no parameter {part.param}"
            bytes_read[part.param] += part.numel * expected.itemsize
            needed = bytes_read[part.param]
            contiguous = "not contiguous"
            if tensor.is_contiguous():
                contiguous = "contiguous"
                if tensor.dtype == expected and tensor.nbytes >= needed:
                    continue
            return (
                f"parameter {part.param} has {tensor.numel()} elements of {tensor.dtype}, "
                f"{contiguous}; the plan reads {needed // expected.itemsize} contiguous elements "
                f"of {expected}"
            )
        return None

    def _stage(self, parameters: Parameters) -> dict[int, Tensor]:
        """Receives and verifies all messages from other ranks; returns message index -> buffer."""
        with self.span("staging"):
            staged, checksums = self.executor.receive(parameters)
            self._compare(checksums)
        return staged

    def _write(self, parameters: Parameters, staged: dict[int, Tensor] | None) -> str | None:
        """Writes every message into the engine, on arrival or from `staged`, which it empties.
        Returns a description of the first problem, or None."""
        written = []
        faults = []  # per written message: it reads back differently
        errors = []  # reported after all rounds, because peers wait for every round

        def write(message: Message, flat: Tensor) -> None:
            if self.receiver and not errors:
                try:
                    faults.append(self.receiver.write(message, flat))
                    written.append(message)
                except Exception as error:  # noqa: BLE001 (raised on all ranks later)
                    where = self.executor.describe(message)
                    errors.append(f"{where}: {type(error).__name__}: {error}")

        if staged is None:
            self._compare(self.executor.run(parameters, write, include_local=True))
        else:
            for message in self._received():
                flat = staged.pop(message.index, None)
                if flat is None:
                    flat = self.executor.pack(message, parameters)
                write(message, flat.to(self._device, non_blocking=True))
        if errors:
            return errors[0]
        if not written:
            return None
        # synchronizes the device once
        wrong = list(compress(written, torch.stack(faults).tolist()))
        if not wrong:
            return None
        return (
            f"{len(wrong)} messages differ when read back after writing: "
            f"{self.executor.describe(wrong[0])}"
        )

    def _received(self) -> Iterator[Message]:
        """Yields the messages to this rank, including local copies."""
        for message in self.executor.messages:
            if message.receiver == self.transport.rank:
                yield message

    def _compare(self, checksums: Tensor) -> None:
        """Raises CheckFailed, on all ranks, if the checksums of a message differ between its sender
        and its receiver."""
        sent, received = self.transport.sum(checksums)
        changed = set((sent != received).nonzero().flatten().tolist())
        if not changed:
            return
        mine = [message for message in self._received() if message.index in changed]
        texts = self.transport.gather(list(map(self.executor.describe, mine[:4])))
        raise CheckFailed(
            f"{len(changed)} of {len(sent)} messages arrived corrupted: "
            f"{'; '.join(islice(chain.from_iterable(texts), 4))}; "
            "if this happens again, check the network link and the memory of these ranks"
        )

    def _seal(self) -> str | None:
        """Seals the receiver. Describes tensors of which it loaded more or fewer elements than this
        rank stores."""
        if self.receiver is None:
            return None
        try:
            loaded = self.receiver.seal()
        except CheckFailed as error:
            return str(error)
        kept = Counter()
        for part in self.receiver.slices:
            kept[part.name] += part.numel
        names = sorted(kept.keys() | loaded.keys())
        wrong = [name for name in names if kept[name] != loaded.get(name, 0)]
        if not wrong:
            return None
        return f"loaded tensors differ from the expected ones: {', '.join(wrong[:4])}"

    def _check_placement(self, parameters: Parameters) -> None:
        shapes = self.weights.moved_shapes()
        slices = self.weights.moved_slices(self.sender.slices)
        checksums = torch.zeros(len(slices), dtype=torch.int64, device=self._device)
        for number, part in enumerate(slices):
            checksums[number] = slice_checksum(
                part,
                parameters,
                shapes[part.name],
                self.weights.unit,
                self.sender.encoder,
            )
        sent = sums_by_tensor(shapes, slices, checksums)
        received = torch.zeros_like(sent)
        if self.receiver:
            checksums = self.receiver.positional_checksums()
            received = sums_by_tensor(shapes, self.receiver.slices, checksums)
        check_placement(self.transport, shapes, self.plan.placement.replicas, sent, received)

    def _raise_on_all_ranks(self, problem: str | None) -> None:
        """Raises CheckFailed on every rank if any rank has a problem."""
        if self._count(problem is not None):
            texts = enumerate(self.transport.gather(problem))
            problems = [f"rank {rank}: {text}" for rank, text in texts if text]
            raise CheckFailed(f"weights were not published: {'; '.join(problems[:4])}")

    def _count(self, flag: bool) -> int:
        return int(self.transport.sum(torch.tensor(int(flag), device=self._device)))


@contextmanager
def _engine_state_in_error(outcome: str, *undo: Callable[[], None]) -> Iterator[None]:
    """Calls `undo` on any exception, and appends the engine state `outcome` to a CheckFailed."""
    try:
        yield
    except BaseException as error:
        for step in undo:
            step()
        if isinstance(error, CheckFailed):
            raise CheckFailed(f"{error}. {outcome}") from error
        raise
