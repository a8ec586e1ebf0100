"""Who samples what, and how every rank comes to hold all of it.

    requests (the same on all ranks) --replica r takes r, r + R, ...--> engine --first rank scores--> one all-gather
    --> the same scored samples on every rank, sorted by (prompt, index)

What travels is flat: one byte tensor a rank, [header | ints | tokens | masks | log-probs | JSON of what is not
numbers]; no pickles. A rank on which sampling or scoring raised sends its error instead, so nobody waits for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.layout import Axis
from megarl.roles import Request, Rewards, Sampler
from megarl.types import FINISH, CheckFailed, Sample

__all__ = ["Exchange", "pack", "unpack"]

INTS = ("prompt_id", "index", "length", "finish", "oldest", "newest")  # per sample
STATUS, SAMPLES, TOKENS, DIGEST, JSON = range(5)  # the header
OK, REFUSED, BROKEN = range(3)  # status


class Exchange:
    """Called as `generate(requests, version)` by the schedule, on every rank with the same requests."""

    def __init__(
        self,
        sampler: Sampler,
        rewards: Rewards,
        *,
        replica: Axis,  # of how many replicas this rank's is which
        member: Axis,  # of the replica's ranks this is which; the first one scores
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        span: Callable[[str], AbstractContextManager[None]] = nullcontext,  # times "reward"
    ) -> None:
        self._sampler = sampler
        self._rewards = rewards
        self._replica = replica
        self._member = member
        self._device = device
        self._group = group
        self._span = span

    def __call__(self, requests: Sequence[Request], version: int) -> list[Sample]:
        """All requests' samples, scored, sorted by (prompt, index).

        Raises on every rank alike what went wrong on one: CheckFailed as such, anything else as RuntimeError.
        """
        parts = self._all_gather(self._work(requests[self._replica.rank :: self._replica.size], version))
        failures = [(rank, status, text) for rank, part in enumerate(parts) for status, text in _failure(part)]
        if failures:
            rank, status, text = min(failures, key=lambda failure: (failure[1] != BROKEN, failure[0]))
            raise (CheckFailed if status == REFUSED else RuntimeError)(f"rank {rank} could not sample: {text}")
        self._refuse_divergence(parts)
        samples = [sample for part in parts for sample in unpack(part)]
        return sorted(samples, key=lambda sample: (sample.prompt_id, sample.index))

    def _work(self, mine: Sequence[Request], version: int) -> Tensor:
        try:
            samples = self._sampler.sample(mine, version=version)
            digest = _digest(samples)
            if not self._member.first:
                return pack([], digest)
            with self._span("reward"):
                samples = self._rewards.score([request.prompt for request in mine], samples)
            return pack(samples, digest)
        except Exception as error:  # noqa: BLE001 (peers wait in the all-gather below: the error goes there)
            status = REFUSED if isinstance(error, CheckFailed) else BROKEN
            return _part([status, 0, 0, 0], [], str(error) if status == REFUSED else f"{type(error).__name__}: {error}")

    def _all_gather(self, part: Tensor) -> list[Tensor]:
        """Every rank's bytes; padded to the longest, whose length is agreed first."""
        if not dist.is_initialized() or dist.get_world_size(self._group) == 1:
            return [part]
        world = dist.get_world_size(self._group)
        size = torch.tensor([part.numel()], device=self._device)
        sizes = torch.empty(world, dtype=torch.int64, device=self._device)
        dist.all_gather_into_tensor(sizes, size, group=self._group)
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: part.numel()] = part.to(self._device)
        everything = torch.empty(world * longest, dtype=torch.uint8, device=self._device)
        dist.all_gather_into_tensor(everything, padded, group=self._group)
        rows = everything.cpu().view(world, longest)
        return [row[:length].clone() for row, length in zip(rows, sizes.tolist(), strict=True)]

    def _refuse_divergence(self, parts: Sequence[Tensor]) -> None:
        """Ranks of one replica must have drawn the same tokens: each is the other's tensor-parallel half."""
        seen = [int(_header(part)[DIGEST]) for part in parts]
        for first in range(0, len(seen), self._member.size):
            if len(set(seen[first : first + self._member.size])) > 1:
                ranks = f"{first}..{first + self._member.size - 1}"
                raise CheckFailed(
                    f"ranks {ranks} of one engine replica sampled different tokens from the same requests"
                )


def pack(samples: Sequence[Sample], digest: int) -> Tensor:
    """[bytes] uint8. Raises TypeError when `extra` holds what JSON cannot."""
    ints = [(s.prompt_id, s.index, s.tokens.numel(), FINISH.index(s.finish), *s.versions) for s in samples]
    rest = [
        {
            "text": s.text,
            "reward": s.reward,
            "rewards": s.rewards,
            "steps": s.step_rewards,
            "outcome": s.has_outcome,
            "extra": s.extra,
        }
        for s in samples
    ]
    empty = torch.empty(0)
    columns = [
        torch.tensor(ints, dtype=torch.int64),
        torch.cat([empty.long(), *(s.tokens.to(torch.int64) for s in samples)]),
        torch.cat([empty.float(), *(s.rollout_logprobs.to(torch.float32) for s in samples)]),
        torch.cat([empty.bool(), *(s.trainable for s in samples)]),
    ]
    header = [OK, len(samples), sum(s.tokens.numel() for s in samples), digest]
    return _part(header, columns, json.dumps(rest))


def unpack(part: Tensor) -> list[Sample]:
    """What `pack` packed; values and dtypes exactly."""
    _, num_samples, num_tokens, _, json_bytes = _header(part)
    at = 8 * (JSON + 1)

    def column(count: int, dtype: torch.dtype) -> Tensor:
        nonlocal at
        size = count * dtype.itemsize
        found = part[at : at + size].clone().view(dtype)
        at += size
        return found

    ints = column(num_samples * len(INTS), torch.int64).view(num_samples, len(INTS)).tolist()
    tokens = column(num_tokens, torch.int64)
    logprobs = column(num_tokens, torch.float32)
    trainable = column(num_tokens, torch.bool)
    rest: list[dict[str, Any]] = json.loads(bytes(part[at : at + json_bytes].tolist()))
    samples, start = [], 0
    for (prompt_id, index, length, finish, oldest, newest), more in zip(ints, rest, strict=True):
        here = slice(start, start + length)
        start += length
        samples.append(
            Sample(
                prompt_id=prompt_id,
                index=index,
                tokens=tokens[here],
                trainable=trainable[here],
                rollout_logprobs=logprobs[here],
                versions=(oldest, newest),
                finish=FINISH[finish],
                text=more["text"],
                reward=more["reward"],
                rewards=more["rewards"],
                step_rewards=tuple((position, reward) for position, reward in more["steps"]),
                has_outcome=more["outcome"],
                extra=more["extra"],
            )
        )
    return samples


def _part(header: Sequence[int], columns: Sequence[Tensor], text: str) -> Tensor:
    data = text.encode()
    tensors = [torch.tensor([*header, len(data)], dtype=torch.int64), *columns]
    tail = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return torch.cat([*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors), tail])


def _header(part: Tensor) -> list[int]:
    return part[: 8 * (JSON + 1)].clone().view(torch.int64).tolist()


def _failure(part: Tensor) -> list[tuple[int, str]]:
    header = _header(part)
    if header[STATUS] == OK:
        return []
    return [(header[STATUS], bytes(part[8 * (JSON + 1) :].tolist()).decode())]


def _digest(samples: Sequence[Sample]) -> int:
    """63 bits of the sampled tokens."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(f"{sample.prompt_id} {sample.index} {sample.tokens.tolist()}".encode())
    return int.from_bytes(digest.digest()[:8], "big") >> 1
