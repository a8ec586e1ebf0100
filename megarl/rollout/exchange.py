"""Deals requests to engine replicas, and gathers the scored samples on every rank.

    requests, the same on all ranks
      --deal: a prompt's samples to one replica--> engine --> scored on the replica's first rank
      --first ranks round a ring, then their members--> the same samples on every rank, in order
      --> a reward model, whose forward pass takes all ranks, adds its scores

The first rank of a replica contributes one byte tensor (`pack`), in host memory (gloo) and without
padding. Routes are wide: they stay on that rank, which the header names, until the rows are dealt
to micro-batches (trainer/router_replay.py). A rank on which sampling or scoring fails reports that
before anything is sent, so that its peers do not wait for it.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import chain, groupby

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.layout import Axis
from megarl.roles import Rewards, Sampler, SpanContext
from megarl.rollout.overlap import AsyncRollouts
from megarl.rollout.sampling import check_version, sample_all
from megarl.rollout.schedule import digest_samples
from megarl.types import SAMPLE_TENSORS, CheckFailed, Request, Routes, Sample, Terminated
from megarl.weights.sync.transports.values import from_bytes, gather_values, to_bytes

ERRORS = (RuntimeError, CheckFailed, Terminated)


@dataclass(frozen=True)
class Exchange:
    """Samples for the schedule, which calls it on every rank with the same requests."""

    sampler: Sampler
    rewards: Rewards
    replica: Axis  # this rank's replica among all replicas
    member: Axis  # this rank among the ranks of its replica; the first one scores
    # called when this rank's requests are sampled, before their rewards are awaited
    finish: Callable[[], None] = lambda: None
    # times the parts "reward" and "exchange"
    span: SpanContext = nullcontext
    is_stopping: Callable[[], bool] = lambda: False
    # all ranks wait here, on the host, for the slowest replica
    meet: Callable[[], None] = lambda: None
    score: Callable[[list[Sample]], list[Sample]] = list  # by a reward model

    def __call__(self, requests: Sequence[Request], version: int) -> list[Sample]:
        """Returns the scored samples of all requests, sorted by (prompt, index).

        If a rank fails, every rank raises: Terminated or CheckFailed if the rank raised that, else
        RuntimeError. Raises CheckFailed if the ranks of a replica sample different tokens.
        """
        rank = self.replica.rank * self.member.size + self.member.rank
        part = torch.empty(0, dtype=torch.uint8)
        digest = ""
        error = None
        own = []
        try:
            share = deal(requests, self.replica.size)[self.replica.rank]
            own, digest = self._sample(share, version)
            if self.member.first:
                part = pack(own)
        except CheckFailed as refusal:
            self.finish()
            error = (ERRORS.index(type(refusal)), rank, str(refusal))
        except Exception as defect:  # noqa: BLE001 (raised below, on every rank)
            self.finish()
            error = (0, rank, f"{type(defect).__name__}: {defect}")
        sizes = self._agree(part, digest, error)
        with self.span("exchange"):
            parts = self._gather(part, sizes)
        choices = {sample.key: sample.choices for sample in own}
        samples = chain.from_iterable(map(unpack, parts))
        samples = [replace(s, choices=choices.get(s.key, s.choices)) for s in samples]
        return self.score(sorted(samples, key=lambda sample: sample.key))

    def _agree(
        self,
        part: Tensor,
        digest: str,
        error: tuple[int, int, str] | None,
    ) -> Sequence[int]:
        """Returns the size of each replica's part. Raises, on every rank, if a rank failed."""
        reports = [(part.numel(), digest, error)]
        size = self.member.size
        if self.replica.size * size > 1:
            self.meet()  # a collective would time out before a slow replica arrives
            reports = gather_values(reports[0])
        sizes, digests, errors = zip(*reports, strict=True)
        if any(errors):
            # report a bug before a refusal that it may have caused
            kind, rank, text = min(filter(None, errors))
            raise ERRORS[kind](f"rank {rank} could not sample: {text}")
        for first in range(0, len(digests), size):
            if len(set(digests[first : first + size])) > 1:
                raise CheckFailed(
                    f"ranks {first}..{first + size - 1} "
                    "of an engine replica sampled different tokens for the same requests"
                )
        return sizes[::size]

    def _sample(self, requests: Sequence[Request], version: int) -> tuple[list[Sample], str]:
        """Returns the replica's samples, which its first rank scores, and their digest."""
        if self.member.first:
            rollouts = AsyncRollouts(self.sampler, self.rewards, self.span, self.is_stopping)
            started = rollouts.begin(requests, version=version)
            rollouts.drain()
            self.finish()
            samples = started.result()
        else:
            samples = sample_all(self.sampler, requests)
            self.finish()
        check_version(samples, version)
        return samples, digest_samples(samples)

    def _gather(self, part: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Returns the parts of all replicas, on every rank.

        They go round the ring of first ranks, and down the chain of each one's members: a part
        crosses every link once.
        """
        size = self.member.size
        first = self.replica.rank * size
        rank = first + self.member.rank
        world = size * self.replica.size
        previous = (first - size) % world if self.member.first else rank - 1
        parts = torch.empty(sum(sizes), dtype=torch.uint8).split(list(sizes))
        sends = []
        for hop in range(self.replica.size):
            this = parts[(self.replica.rank - hop) % self.replica.size]
            if self.member.first and hop == 0:
                this.copy_(part)
            else:
                dist.recv(this, previous)
            if self.member.first and hop < self.replica.size - 1:
                sends.append(dist.isend(this, (first + size) % world))
            if self.member.rank < size - 1:
                sends.append(dist.isend(this, rank + 1))
        for send in sends:
            send.wait()
        return parts


def deal(requests: Sequence[Request], replicas: int) -> list[list[Request]]:
    """Returns the requests of each replica.

    A prompt's requests stay together, as the first sample fills the cache for the others. Replicas
    get equally many prompts (within one) and tokens. With fewer prompts than replicas, a prompt's
    requests are split.
    """
    by_prompt = groupby(requests, lambda request: request.prompt.prompt_id)
    prompts = [list(group) for _, group in by_prompt]
    pieces = max(replicas // max(len(prompts), 1), 1)
    groups = []
    for group in prompts:
        groups += [group[piece::pieces] for piece in range(min(pieces, len(group)))]
    shares = [[] for _ in range(replicas)]
    loads = [(0, 0, replica) for replica in range(replicas)]  # groups, prompt tokens
    for group in sorted(groups, key=lambda group: -len(group[0].prompt.tokens)):
        count, tokens, replica = heappop(loads)
        shares[replica] += group
        heappush(loads, (count + 1, tokens + len(group[0].prompt.tokens), replica))
    return shares


def pack(samples: Sequence[Sample]) -> Tensor:
    """Returns [bytes] uint8. Raises TypeError if JSON cannot represent a value in `extra`."""
    rows = []
    for sample in samples:
        row = {key: value for key, value in vars(sample).items() if key not in SAMPLE_TENSORS}
        row["length"] = sample.tokens.numel()
        row["choices"] = sample.choices and (sample.choices.owners, sample.choices.checksums)
        rows.append(row)
    columns = {}
    for name, dtype in SAMPLE_TENSORS.items():
        parts = [getattr(sample, name).to(dtype) for sample in samples]
        columns[name] = torch.cat([torch.empty(0, dtype=dtype), *parts])
    return to_bytes((json.dumps(rows), columns))


def unpack(part: Tensor) -> list[Sample]:
    """Returns the samples that `pack` packed, with equal values and dtypes, but no experts."""
    text, columns = from_bytes(part)
    rows = json.loads(text)
    lengths = [row.pop("length") for row in rows]
    for row in rows:  # JSON has lists only
        row["step_rewards"] = tuple(map(tuple, row["step_rewards"]))
        if row["choices"]:
            owners, checksums = map(tuple, row["choices"])
            row["choices"] = Routes(owners, checksums)
    for name, column in columns.items():
        for row, values in zip(rows, column.split(lengths), strict=True):
            row[name] = values
    return [Sample(**row) for row in rows]
