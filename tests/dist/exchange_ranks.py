"""One rank of an exchange: 4 ranks, 2 replicas of 2, stand-in samplers. Leaves FOLDER/rank_<r>.json."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import sleep

import torch
import torch.distributed as dist
from samplers import AtOnce

from megarl.layout import Axis
from megarl.rollout.exchange import Exchange
from megarl.types import CheckFailed, Prompt, Sample
from megarl.weights.sync.transports.collective import Collective

TIMEOUT_S = 5.0  # of collectives


@dataclass(frozen=True)
class Request:
    prompt: Prompt
    index: int
    seed: int = 0
    temperature: float = 1.0

    @property
    def key(self):
        return self.prompt.prompt_id, self.index


class Sampler(AtOnce):
    def __init__(self, drift: int = 0, seconds: float = 0.0) -> None:
        """`drift` is added to the first token."""
        super().__init__(self.sample)
        self.drift, self.seconds, self.calls = drift, seconds, 0

    def poll(self, timeout_s=None):
        sleep(self.seconds)
        return super().poll(timeout_s)

    def sample(self, r):
        self.calls += 1
        length = 3 + r.prompt.prompt_id
        return Sample(
            r.prompt.prompt_id,
            r.index,
            torch.tensor([self.drift, r.prompt.prompt_id] + [r.index] * (length - 2)),
            torch.ones(length, dtype=torch.bool),
            torch.full((length,), -0.1 * r.index),
            torch.full((length,), 8, dtype=torch.int32),
            "stop",
        )


@dataclass
class Rewards:
    fail: bool = False
    calls: int = 0

    def start(self, prompts):
        return self

    def add(self, samples):
        pass

    def results(self, samples):
        self.calls += len(samples)
        if self.fail:
            raise OSError("the scorer is gone")
        return [replace(s, reward=float(s.prompt_id), rewards={"r": s.index}) for s in samples]


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank, transport = dist.get_rank(), Collective(timeout_s=TIMEOUT_S)

    def exchange(sampler: Sampler, rewards: Rewards) -> Exchange:
        replica, member = Axis(2, rank // 2), Axis(2, rank % 2)
        meet = partial(transport.barrier, "the exchange of samples", patience=12)
        return Exchange(sampler, rewards, replica=replica, member=member, meet=meet)

    requests = [Request(Prompt(p, (1,), ""), i) for p in range(3) for i in range(3)]
    sampler, rewards = Sampler(), Rewards()
    got = exchange(sampler, rewards)(requests, 8)
    seen = {
        "samples": [
            (s.prompt_id, s.index, s.tokens.tolist(), s.rollout_logprobs.tolist(), s.reward)
            for s in got
        ],
        "sampled": sampler.calls,
        "scored": rewards.calls,
    }
    for name, (one, other) in {
        "broken": (Sampler(), Rewards(fail=rank == 2)),
        "drifted": (Sampler(drift=int(rank == 3)), Rewards()),
    }.items():
        try:
            exchange(one, other)(requests, 8)
        except (RuntimeError, CheckFailed) as error:
            seen[name] = f"{type(error).__name__}: {error}"
    slow = Sampler(seconds=1.5 * TIMEOUT_S if rank < 2 else 0.0)
    seen["slow"] = len(exchange(slow, rewards)(requests, 8))
    # fewer requests than replicas; nobody is stuck
    seen["after"] = len(exchange(sampler, rewards)(requests[:1], 8))
    (folder / f"rank_{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
