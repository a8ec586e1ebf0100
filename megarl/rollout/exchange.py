"""Distributes requests over engine replicas, and gathers the scored samples on every rank.

    requests (the same on all ranks) --replica r takes r, r + R, ...--> engine --its first rank scores--> one all-gather
    --> the same scored samples on every rank, sorted by (prompt, index)

Each rank contributes one byte tensor [header length | JSON header | tokens | log-probs | masks]; no pickles. A rank on
which sampling or scoring fails contributes its error instead, so that its peers do not wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.layout import Axis
from megarl.roles import Rewards, Sampler
from megarl.rollout.schedule import digest_samples
from megarl.types import SAMPLE_TENSORS, CheckFailed, Request, Sample, Terminated

LENGTH_BYTES = 8  # of the header's length
ERRORS = (RuntimeError, CheckFailed, Terminated)


@dataclass(frozen=True)
class Exchange:
    """Called as `generate(requests, version)` by the schedule, on every rank with the same requests."""

    sampler: Sampler
    rewards: Rewards
    replica: Axis  # this rank's replica among all replicas
    member: Axis  # this rank among those of its replica; the first one scores
    device: torch.device
    span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()  # times "reward"
    is_stopping: Callable[[], bool] = lambda: False
    meet: Callable[[], None] = lambda: None  # all ranks wait here, on the host, for the slowest replica

    def __call__(self, requests: Sequence[Request], version: int) -> list[Sample]:
        """Returns the scored samples of all requests, sorted by (prompt, index).

        If a rank fails, every rank raises: Terminated or CheckFailed if the rank raised that, else RuntimeError.
        Raises CheckFailed if the ranks of a replica sample different tokens.
        """
        parts = self._all_gather(self._sample(requests[self.replica.rank :: self.replica.size], version))
        headers = [_header(part)[0] for part in parts]
        failures = [(header["kind"], rank) for rank, header in enumerate(headers) if "error" in header]
        if failures:
            kind, rank = min(failures)  # report a bug before a refusal that it may have caused
            raise ERRORS[kind](f"rank {rank} could not sample: {headers[rank]['error']}")
        digests = [header["digest"] for header in headers]
        for first in range(0, len(digests), self.member.size):
            if len(set(digests[first : first + self.member.size])) > 1:
                ranks = f"{first}..{first + self.member.size - 1}"
                raise CheckFailed(f"ranks {ranks} of an engine replica sampled different tokens for the same requests")
        samples = [sample for part in parts for sample in unpack(part)]
        return sorted(samples, key=lambda sample: (sample.prompt_id, sample.index))

    def _sample(self, requests: Sequence[Request], version: int) -> Tensor:
        """This rank's contribution: the scored samples of its replica, or an error."""
        try:
            samples = self.sampler.sample(requests, version=version)
            digest = digest_samples(samples)
            if not self.member.first:
                return pack([], digest)
            with self.span("reward"):
                samples = self.rewards.score([request.prompt for request in requests], samples)
            if self.is_stopping():  # SIGTERM may have ended a reward's processes, too
                raise Terminated("stopped by SIGTERM")
            return pack(samples, digest)
        except CheckFailed as error:
            return _part({"error": str(error), "kind": ERRORS.index(type(error))})
        except Exception as error:  # noqa: BLE001 (peers wait in the all-gather, which carries the error)
            return _part({"error": f"{type(error).__name__}: {error}", "kind": 0})

    def _all_gather(self, part: Tensor) -> list[Tensor]:
        """The parts of all ranks, padded to the longest while they travel."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world == 1:
            return [part]
        self.meet()  # NCCL's watchdog would end the job if a rank waited on the device for long
        size = torch.tensor([part.numel()], device=self.device)
        sizes = torch.empty(world, dtype=torch.int64, device=self.device)
        dist.all_gather_into_tensor(sizes, size)
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: part.numel()] = part.to(self.device)
        gathered = torch.empty(world * longest, dtype=torch.uint8, device=self.device)
        dist.all_gather_into_tensor(gathered, padded)
        rows = gathered.cpu().view(world, longest)
        return [row[:length].clone() for row, length in zip(rows, sizes.tolist(), strict=True)]


def pack(samples: Sequence[Sample], digest: str) -> Tensor:
    """[bytes] uint8. Raises TypeError if `extra` has values that JSON cannot represent."""
    names = [field.name for field in fields(Sample) if field.name not in SAMPLE_TENSORS]
    rows = [{"length": s.tokens.numel(), **{name: getattr(s, name) for name in names}} for s in samples]
    columns = [
        torch.cat([torch.empty(0, dtype=dtype), *(getattr(sample, name).to(dtype) for sample in samples)])
        for name, dtype in SAMPLE_TENSORS.items()
    ]
    return _part({"digest": digest, "samples": rows}, *columns)


def unpack(part: Tensor) -> list[Sample]:
    """The samples that `pack` packed, with equal values and dtypes."""
    header, offset = _header(part)
    rows: list[dict[str, Any]] = header["samples"]
    lengths = [row.pop("length") for row in rows]
    columns: dict[str, Sequence[Any]] = {}
    for name, dtype in SAMPLE_TENSORS.items():
        end = offset + sum(lengths) * dtype.itemsize
        columns[name] = part[offset:end].clone().view(dtype).split(lengths) if rows else ()
        offset = end
    for row in rows:  # JSON has lists only
        row["versions"] = tuple(row["versions"])
        row["step_rewards"] = tuple(map(tuple, row["step_rewards"]))
    return [Sample(**row, **{name: columns[name][i] for name in SAMPLE_TENSORS}) for i, row in enumerate(rows)]


def _part(header: dict[str, Any], *columns: Tensor) -> Tensor:
    text = json.dumps(header).encode()
    data = bytearray(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    tensors = [torch.frombuffer(data, dtype=torch.uint8), *(column.view(torch.uint8) for column in columns)]
    return torch.cat(tensors)


def _header(part: Tensor) -> tuple[dict[str, Any], int]:
    """The header, and the offset of what follows it."""
    end = LENGTH_BYTES + int.from_bytes(part[:LENGTH_BYTES].numpy().tobytes(), "little")
    return json.loads(part[LENGTH_BYTES:end].numpy().tobytes()), end
