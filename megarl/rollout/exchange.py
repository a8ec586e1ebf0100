"""Deals requests to engine replicas, and gathers the scored samples on every rank.

    requests (the same on all ranks) --deal: a prompt's samples to one replica--> engine --its first rank scores--+
    the same scored samples on every rank, sorted by (prompt, index) <--first ranks, round a ring, then their members
                                         '--> a reward model, whose forward pass takes all ranks, adds its scores

The first rank of a replica contributes one byte tensor (`pack`), in host memory (gloo) and without padding. Routes are
wide: they stay on that rank, which the header names, until the rows are dealt to micro-batches
(trainer/router_replay.py). A rank on which sampling or scoring fails reports that before anything is sent, so that its
peers do not wait for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from heapq import heappop, heappush
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl import types
from megarl.layout import Axis
from megarl.roles import Rewards, Sampler
from megarl.rollout.schedule import digest_samples
from megarl.types import SAMPLE_TENSORS, CheckFailed, Request, Routes, Sample, Terminated
from megarl.weights.transports.values import gather_values

LENGTH_BYTES = 8  # of the header's length
BATCHES = {
    kind.__name__: kind
    for kind in (types.TokenBatch, types.TrainBatch, types.ScoredBatch, types.TokenScores)
}
ERRORS = (RuntimeError, CheckFailed, Terminated)


@dataclass(frozen=True)
class Exchange:
    """Called as `generate(requests, version)` by the schedule, on every rank with the same requests."""

    sampler: Sampler
    rewards: Rewards
    replica: Axis  # this rank's replica among all replicas
    member: Axis  # this rank among those of its replica; the first one scores
    span: Callable[[str], AbstractContextManager[None]] = lambda name: (
        nullcontext()
    )  # of "reward" and "exchange"
    is_stopping: Callable[[], bool] = lambda: False
    meet: Callable[[], None] = lambda: (
        None
    )  # all ranks wait here, on the host, for the slowest replica
    score: Callable[[list[Sample]], list[Sample]] = lambda samples: samples  # with a reward model

    def __call__(self, requests: Sequence[Request], version: int) -> list[Sample]:
        """Returns the scored samples of all requests, sorted by (prompt, index).

        If a rank fails, every rank raises: Terminated or CheckFailed if the rank raised that, else RuntimeError.
        Raises CheckFailed if the ranks of a replica sample different tokens.
        """
        rank, world = (
            self.replica.rank * self.member.size + self.member.rank,
            self.replica.size * self.member.size,
        )
        part, digest, error, own = torch.empty(0, dtype=torch.uint8), "0", None, list[Sample]()
        try:
            own, digest = self._sample(
                deal(requests, self.replica.size)[self.replica.rank], version
            )
            part = pack(own) if self.member.first else part
        except CheckFailed as refusal:
            error = (ERRORS.index(type(refusal)), rank, str(refusal))
        except Exception as defect:  # noqa: BLE001 (raised below, on every rank)
            error = (0, rank, f"{type(defect).__name__}: {defect}")
        entry = torch.tensor([part.numel(), int(digest[:15], 16), error is not None])
        entries = entry.repeat(world)
        if world > 1:
            self.meet()  # a replica may be later than a collective waits
            dist.all_gather_into_tensor(entries, entry)
        entries = entries.view(world, len(entry))
        if entries[:, 2].any():
            errors = gather_values(error) if world > 1 else [error]
            kind, rank, text = min(
                filter(None, errors)
            )  # report a bug before a refusal that it may have caused
            raise ERRORS[kind](f"rank {rank} could not sample: {text}")
        for replica, digests in enumerate(entries[:, 1].view(-1, self.member.size).tolist()):
            if len(set(digests)) > 1:
                ranks = f"{replica * self.member.size}..{(replica + 1) * self.member.size - 1}"
                raise CheckFailed(
                    f"ranks {ranks} of an engine replica sampled different tokens for the same requests"
                )
        with self.span("exchange"):
            parts = self._gather(part, entries[:: self.member.size, 0].tolist())
        routes = {(sample.prompt_id, sample.index): sample.routes for sample in own}
        samples = [sample for part in parts for sample in unpack(part)]
        samples = [replace(s, routes=routes.get((s.prompt_id, s.index), s.routes)) for s in samples]
        return self.score(sorted(samples, key=lambda sample: (sample.prompt_id, sample.index)))

    def _sample(self, requests: Sequence[Request], version: int) -> tuple[list[Sample], str]:
        """The scored samples of this replica, on its first rank, and their digest."""
        if not self.member.first:
            return [], digest_samples(self.sampler.sample(requests, version=version))
        scoring = self.rewards.start([request.prompt for request in requests])
        samples = self.sampler.sample(requests, version=version, finished=scoring.add)
        with self.span("reward"):  # what generation has not hidden
            scored = scoring.results(samples)
        if self.is_stopping():  # SIGTERM may have ended a reward's processes, too
            raise Terminated("stopped by SIGTERM")
        return scored, digest_samples(samples)

    def _gather(self, part: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """The parts of all replicas, on every rank. They go round the ring of first ranks, and down the chain of each
        one's members: a part crosses every link once."""
        size, first = self.member.size, self.replica.rank * self.member.size
        rank, world, leads = first + self.member.rank, size * self.replica.size, self.member.first
        parts, sends = torch.empty(sum(sizes), dtype=torch.uint8).split(list(sizes)), []
        for hop in range(self.replica.size):
            this = parts[(self.replica.rank - hop) % self.replica.size]
            if leads and hop == 0:
                this.copy_(part)
            else:
                dist.recv(this, (first - size) % world if leads else rank - 1)
            if leads and hop < self.replica.size - 1:
                sends.append(dist.isend(this, (first + size) % world))
            if self.member.rank < size - 1:
                sends.append(dist.isend(this, rank + 1))
        for send in sends:
            send.wait()
        return parts


def deal(requests: Sequence[Request], replicas: int) -> list[list[Request]]:
    """The requests of each replica: those of a prompt together, whose first sample fills the cache for the others, and
    equally many prompts (within one) and tokens. With fewer prompts than replicas, a prompt's requests are split."""
    groups = [
        list(group) for _, group in groupby(requests, lambda request: request.prompt.prompt_id)
    ]
    pieces = max(replicas // max(len(groups), 1), 1)
    groups = [group[piece::pieces] for group in groups for piece in range(min(pieces, len(group)))]
    shares: list[list[Request]] = [[] for _ in range(replicas)]
    loads = [(0, 0, replica) for replica in range(replicas)]  # groups, prompt tokens
    for group in sorted(groups, key=lambda group: -len(group[0].prompt.tokens)):
        count, tokens, replica = heappop(loads)
        shares[replica] += group
        heappush(loads, (count + 1, tokens + len(group[0].prompt.tokens), replica))
    return shares


def _frame(header: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """[bytes] uint8: [header length | JSON header, dtypes and shapes | tensors]."""
    kinds = {
        name: (str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in tensors.items()
    }
    text = json.dumps((header, kinds)).encode()
    head = torch.frombuffer(
        bytearray(len(text).to_bytes(LENGTH_BYTES, "little") + text), dtype=torch.uint8
    )
    return torch.cat(
        [head, *(x.contiguous().flatten().view(torch.uint8) for x in tensors.values())]
    )


def _unframe(data: np.ndarray) -> tuple[Any, dict[str, Tensor]]:
    """The header and copies of the tensors that `_frame` was given."""
    offset = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES].tobytes(), "little")
    (header, kinds), tensors = json.loads(data[LENGTH_BYTES:offset].tobytes()), dict[str, Tensor]()
    for name, (kind, shape) in kinds.items():
        dtype = getattr(torch, kind)
        end = offset + dtype.itemsize * math.prod(shape)
        tensors[name], offset = torch.tensor(data[offset:end]).view(dtype).reshape(shape), end
    return header, tensors


def pack(samples: Sequence[Sample]) -> Tensor:
    """[bytes] uint8. Raises TypeError if `extra` has values that JSON cannot represent."""
    names = [
        field.name for field in fields(Sample) if field.name not in (*SAMPLE_TENSORS, "routes")
    ]
    rows = [
        {"length": s.tokens.numel(), **{name: getattr(s, name) for name in names}}
        | {"routes": s.routes and (s.routes.owners, s.routes.checksums)}
        for s in samples
    ]
    columns = {
        name: torch.cat(
            [torch.empty(0, dtype=dtype), *(getattr(sample, name).to(dtype) for sample in samples)]
        )
        for name, dtype in SAMPLE_TENSORS.items()
    }
    return _frame(rows, columns)


def unpack(part: Tensor) -> list[Sample]:
    """The samples that `pack` packed, with equal values and dtypes, but no experts."""
    rows, columns = _unframe(part.numpy())
    lengths = [row.pop("length") for row in rows]
    for row in rows:  # JSON has lists only
        row["step_rewards"] = tuple(map(tuple, row["step_rewards"]))
        row["routes"] = row["routes"] and Routes(tuple(row["routes"][0]), tuple(row["routes"][1]))
    split: dict[str, Any] = {name: column.split(lengths) for name, column in columns.items()}
    return [
        Sample(**row, **{name: parts[i] for name, parts in split.items()})
        for i, row in enumerate(rows)
    ]


def pack_batch(value: Any) -> Any:
    """A batch, or scores, as flat bytes [L] uint8; anything else as it is."""
    if type(value).__name__ not in BATCHES:
        return value
    contents = {field.name: getattr(value, field.name) for field in fields(value)}
    assert not contents.pop("routes"), "only the colocated topology replays routes"
    tensors = {name: content for name, content in contents.items() if isinstance(content, Tensor)}
    header = {name: content for name, content in contents.items() if name not in tensors}
    return _frame((type(value).__name__, header), tensors).numpy()


def unpack_batch(data: Any) -> Any:
    """What `pack_batch` packed, with equal values and dtypes."""
    if not isinstance(data, np.ndarray):
        return data
    (name, values), tensors = _unframe(data)
    return BATCHES[name](**(values | tensors))
