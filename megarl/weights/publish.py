"""The actor's weights into the engine, shard to shard, verified every time.

    connect:  receivers' boxes gathered, names checked against the checkpoint's, one plan, its fingerprint compared
    publish:  roll call -> all rounds (rounds.py) into staging memory -> checksums compared
              | begin -> every bucket written, and read back -> seal -> places -> probe -> finish(version)

A checksum is taken of every bucket that travels, as packed and as it arrived; both go into one table that is summed
over all ranks, so every rank sees every fault and all refuse together. On the first sync (always, where the probe is)
a second one proves that each slice lies in its place, plan or no plan (places.py).

What fails before `begin` (a rank that does not come, is lost or sends other bytes; a parameter that is not there)
leaves the engine as it was, serving its old version. That costs memory for what a rank receives, on the device if it
has the room, else on the host. `is_staged=False` saves it: buckets are written as they arrive, so that a fault among
the rounds, too, leaves the engine without a version, as whatever fails after `begin` does. It then refuses prompts
until a sync succeeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megarl.models.engine import first_mismatch
from megarl.models.shards import ShardSlice, as_pairs
from megarl.platform.device import free_host_bytes
from megarl.types import CheckFailed, PublishReport
from megarl.weights.execute import BucketChecksums, PlanExecutor
from megarl.weights.fp32_views import shapes_fp32_as_16bit, view_fp32_as_16bit
from megarl.weights.placement_check import PlacementCheck
from megarl.weights.plan import Boxes, Message, Piece, Plan, find_gaps, make_plan
from megarl.weights.transports import Transport

__all__ = ["BUCKET_BYTES", "Probe", "Publisher", "Receiver"]

BUCKET_BYTES = 256 << 20
SPARE_BYTES = 2 << 30  # of the device, left free by what is staged: the layers that are open meanwhile
KEEPS = "The engine keeps the version it had"
REFUSES = "The engine refuses prompts until a sync succeeds"


class Receiver(Protocol):
    """One rank of an engine as weights see it: begin, write ..., seal, finish; abort at any time."""

    @property
    def boxes(self) -> Sequence[ShardSlice]:
        """What this rank keeps of each HF tensor, in the order of its layers."""
        ...

    def begin(self, *, places: bool) -> None:
        """`places`: a checksum of every box will be asked for."""
        ...

    def write(self, message: Message, flat: Tensor) -> Tensor:
        """Write a bucket [numel]; how many of its pieces read back otherwise, int64 scalar."""
        ...

    def seal(self) -> Mapping[str, int]:
        """All is written: elements received of each HF tensor. Raises CheckFailed when a layer is incomplete."""
        ...

    def places(self) -> Tensor:
        """[boxes] int64: `checksum.positional_checksum` of each box, read from where it lay in checkpoint form."""
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
        places: PlacementCheck | None = None,
        is_staged: bool = True,
        ranks_per_node: int = 1,
    ) -> None:
        self._places = places
        self._node_ranks = ranks_per_node
        self._is_staged = is_staged
        self._receiver = receiver
        self._transport = transport
        self._parameters = parameters
        self._dtype = dtype
        self._num_tensors = num_tensors
        self._probe = probe
        self._proven = False
        self._needed = _extents(plan, transport.rank)
        self._fp32_parameters = {p.source.param for p in _read(plan, transport.rank) if p.name in fp32}
        self._device = next(iter(parameters().values())).device
        self.rounds = PlanExecutor(plan, transport, dtype, self._device)

    @classmethod
    def connect(
        cls,
        *,
        sources: Boxes,  # [rank] -> where its parameters hold HF tensors
        expected: Mapping[str, tuple[int, ...]],  # every tensor of the checkpoint with its shape
        parameters: Callable[[], Mapping[str, Tensor]],
        receiver: Receiver,
        ranks_per_replica: int,
        transport: Transport,
        dtype: torch.dtype,
        bucket_bytes: int = BUCKET_BYTES,
        probe: Probe | None = None,
        fp32: frozenset[str] = frozenset(),  # HF tensors that stay fp32 on both sides; the receiver knows them too
        table: Sequence[ShardSlice] | None = None,  # what the family's table says that this rank of the engine keeps
        ranks_per_node: int | None = None,  # ranks of a node; None: all are on one
        is_staged: bool = True,
    ) -> Publisher:
        """Raises CheckFailed, on all ranks, when a tensor is missing on either side, when the engine keeps one
        elsewhere than its table says, or when ranks plan differently."""
        destinations: list[list[ShardSlice]] = transport.gather(list(receiver.boxes))
        if table is not None:
            said = transport.gather(first_mismatch(view_fp32_as_16bit(table, fp32, dtype.itemsize), receiver.boxes))
            if wrong := [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]:
                raise CheckFailed(f"{wrong[0]}: this vLLM lays weights out otherwise than the one megarl is made for")
        paired = {b.name for boxes in sources for b in boxes if len(b.shape) > len(expected[b.name])}
        destinations = [[as_pairs(b) if b.name in paired else b for b in boxes] for boxes in destinations]
        sources = [view_fp32_as_16bit(boxes, fp32, dtype.itemsize) for boxes in sources]
        expected = shapes_fp32_as_16bit(expected, fp32, dtype.itemsize)
        _refuse_gaps("the trainer's ranks hold no complete", find_gaps(expected, sources))
        for first in range(0, transport.world, ranks_per_replica):
            ranks = range(first, first + ranks_per_replica)
            who = f"the engine on ranks {ranks.start}..{ranks.stop - 1} takes no complete"
            _refuse_gaps(who, find_gaps(expected, [_distinct(destinations[r] for r in ranks)]))
        try:
            plan = make_plan(
                sources, destinations, itemsize=dtype.itemsize, bucket_bytes=bucket_bytes, ranks_per_node=ranks_per_node
            )
        except ValueError as error:
            raise CheckFailed(f"no plan moves the weights: {error}") from None
        prints = transport.gather(plan.fingerprint)
        if len(set(prints)) > 1:
            odd = [rank for rank, seen in enumerate(prints) if seen != prints[0]]
            raise CheckFailed(f"ranks {odd} plan other transfers than rank 0: start all ranks with one configuration")
        places = PlacementCheck.of(list(expected), sources, destinations, ranks_per_replica, dtype, frozenset(paired))
        near = ranks_per_node or transport.world
        return cls(plan, receiver, transport, parameters, dtype, len(expected), probe, fp32, places, is_staged, near)

    @property
    def plan(self) -> Plan:
        return self.rounds.plan

    def publish(self, *, version: int) -> PublishReport:
        """Raises CheckFailed, on all ranks, when anything is missing or changed, with what the engine is left with."""
        began = time.perf_counter()
        with _leaving(KEEPS):
            self._transport.barrier(f"the sync of weights, version {version}")
            parameters = self._parameters()
            self._agree(self._lacking(parameters) or self._no_room())
            staged = self._stage(parameters) if self._is_staged else None
        places = self._places if not self._proven or (self._probe is not None and self._probe.always) else None
        self._receiver.begin(places=places is not None)
        try:
            with _leaving(REFUSES):
                self._agree(self._stream(parameters) if staged is None else self._commit(parameters, staged))
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

    def _no_room(self) -> str | None:
        """Before the kernel says so in its own way. All ranks of the node take about as much, all at once."""
        if not self._is_staged or self._staging_device().type == "cuda":
            return None
        needed, free = self._node_ranks * self.rounds.bytes_arriving, free_host_bytes()
        if free is None or needed <= free:
            return None
        return (
            f"what {self._node_ranks} ranks of a node receive is staged in {needed / 1e9:.1f} GB of host memory, of "
            f"which {free / 1e9:.1f} GB are free; give the node more, or set sync.atomic=false"
        )

    def _stage(self, parameters: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Every bucket that comes from another rank, by its number, all as they were sent."""
        where, staged = self._staging_device(), {}
        self._compare(self.rounds.run(parameters, lambda i, flat: staged.update({i: flat.to(where)}), staying=False))
        return staged

    def _staging_device(self) -> torch.device:
        if self._device.type != "cuda":
            return self._device
        free, _ = torch.cuda.mem_get_info(self._device)
        return self._device if free > self.rounds.bytes_arriving + SPARE_BYTES else torch.device("cpu")

    def _commit(self, parameters: Mapping[str, Tensor], staged: dict[int, Tensor]) -> str | None:
        """All buckets into the engine, and staging memory given back on the way; what went wrong."""
        writes = _Writes(self._receiver, self.rounds)
        for index in self.rounds.kept():
            flat = staged.pop(index).to(self._device) if index in staged else self.rounds.pack(index, parameters)
            writes.take(index, flat)
        return writes.fault()

    def _stream(self, parameters: Mapping[str, Tensor]) -> str | None:
        """All rounds, every bucket into the engine as it arrives; what went wrong."""
        writes = _Writes(self._receiver, self.rounds)
        self._compare(self.rounds.run(parameters, writes.take, staying=True))
        return writes.fault()

    def _compare(self, sums: BucketChecksums) -> None:
        sent, received = self._transport.sum(torch.stack([sums.sent, sums.received]))
        changed = (sent != received).nonzero().flatten().tolist()
        if changed:
            shown = "; ".join(self.rounds.bucket(index) for index in changed[:4])
            raise CheckFailed(
                f"{len(changed)} of {len(self.plan.messages)} weight buckets were not received as sent: {shown}; "
                "if it happens again, suspect the link or the memory of these ranks"
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

    def _agree(self, problem: str | None) -> None:
        """Raise CheckFailed on every rank as soon as one has a problem."""
        flag = torch.tensor(int(problem is not None), device=self._device)
        if not int(self._transport.sum(flag)):
            return
        found = [f"rank {rank}: {text}" for rank, text in enumerate(self._transport.gather(problem)) if text]
        raise CheckFailed(f"weights were not published: {'; '.join(found[:4])}")


class _Writes:
    """Buckets into the engine. A write that fails is remembered, for the peers' sake: they wait for later rounds."""

    def __init__(self, receiver: Receiver, rounds: PlanExecutor) -> None:
        self._receiver, self._rounds = receiver, rounds
        self._wrong: list[tuple[int, Tensor]] = []  # (message, its pieces that read back otherwise)
        self._error: str | None = None

    def take(self, index: int, flat: Tensor) -> None:
        if self._error is None:
            try:
                wrong = self._receiver.write(self._rounds.plan.messages[index], flat)
                self._wrong.append((index, wrong))
            except Exception as error:  # noqa: BLE001 (told to all ranks later)
                self._error = f"{self._rounds.bucket(index)}: {type(error).__name__}: {error}"

    def fault(self) -> str | None:
        if self._error is None and self._wrong:
            numbers = torch.stack([wrong for _, wrong in self._wrong]).tolist()  # one wait for the device
            found = [index for (index, _), wrong in zip(self._wrong, numbers, strict=True) if wrong]
            if found:
                return f"{len(found)} buckets read back otherwise than written: {self._rounds.bucket(found[0])}"
        return self._error


@contextmanager
def _leaving(state: str) -> Iterator[None]:
    """Whatever fails within also says what it leaves behind."""
    try:
        yield
    except CheckFailed as error:
        raise CheckFailed(f"{error}. {state}") from error


def _refuse_gaps(who: str, gaps: Sequence[str]) -> None:
    if gaps:
        rest = f" and {len(gaps) - 4} more" if len(gaps) > 4 else ""
        raise CheckFailed(f"{who} {', '.join(gaps[:4])}{rest}")


def _distinct(slices_by_rank: object) -> list[ShardSlice]:
    """Boxes of a replica's ranks, each rectangle once (key-value heads may be held by several)."""
    seen = {(box.name, box.start, box.shape): box for boxes in slices_by_rank for box in boxes}  # type: ignore[attr-defined]
    return list(seen.values())


def _read(plan: Plan, rank: int) -> Iterator[Piece]:
    """The pieces that a rank reads from its parameters."""
    return (piece for m in plan.messages if m.source == rank for piece in m.pieces if not piece.is_relay)


def _extents(plan: Plan, rank: int) -> dict[str, int]:
    """Elements of each local parameter that the plan reads up to."""
    needed: dict[str, int] = {}
    for piece in _read(plan, rank):
        view = piece.source
        last = sum((n - 1) * stride for n, stride in zip(piece.shape, view.strides, strict=True))
        needed[view.param] = max(needed.get(view.param, 0), view.offset + last + 1)
    return needed
