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


@dataclass
class Sampler:
    drift: int = 0  # added to the first token
    calls: int = 0
    seconds: float = 0.0

    def sample(self, requests, *, version, finished=None):
        self.calls += len(requests)
        sleep(self.seconds)
        return [
            Sample(
                r.prompt.prompt_id,
                r.index,
                torch.tensor(
                    [self.drift, r.prompt.prompt_id] + [r.index] * (1 + r.prompt.prompt_id)
                ),
                torch.ones(3 + r.prompt.prompt_id, dtype=torch.bool),
                torch.full((3 + r.prompt.prompt_id,), -0.1 * r.index),
                torch.full((3 + r.prompt.prompt_id,), version, dtype=torch.int32),
                "stop",
            )
            for r in requests
        ]


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
    seen["after"] = len(exchange(sampler, rewards)(requests[:1], 9))
    (folder / f"rank_{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
