"""What 512 ranks exchange, plan and reduce each step: seconds, bytes and memory of one rank.

    python -m benchmarks ranks512 [--json FILE]

measured   real ranks over gloo on this machine: the exchange of samples, and the all-reduce of metrics
one rank   its own work in a world of 512, with the real code: pack its replica's samples, unpack those of all 64
           replicas, digest and metrics; the plan of a weight sync from 512 trainer ranks to 512 engine ranks
computed   the bytes that cross links, and the time at RATE; nothing else stands in for the 512 ranks

Each case runs in a separate process, whose peak memory counts from before its data is made. Every figure of LIMITS is
compared with its limit.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from math import log2
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.plans import CONFIGS
from benchmarks.table import machine
from megarl.config.load import load_config
from megarl.layout import Axis
from megarl.rollout.exchange import Exchange, deal, pack, unpack
from megarl.rollout.schedule import digest_samples
from megarl.telemetry.metrics import rollout_metrics
from megarl.types import Group, Prompt, Request, Rollout, Sample
from megarl.weights.plan.from_config import plan_weights

WORLD, MEMBERS = 512, 8  # 64 replicas of tensor 8, each on a node
RATE = 5e9  # bytes/s of one stream of gloo over a 400G network; an assumption
HOP_S = 200e-6  # of a message between two ranks: Python, gloo and the network; an assumption
NUM_METRICS = 64
# name, kind, arguments
CASES: list[tuple[str, dict[str, int]]] = [
    *(("exchange", {"world": world, "samples": 128, "tokens": 2048}) for world in (2, 4, 8)),
    ("one_rank", {"replicas": WORLD // MEMBERS, "samples": 128, "tokens": 2048}),
    ("plan", {"trainers": 512, "replicas": 64}),
]
# bytes over those of the samples: nothing is padded, and a rank receives each part once
LIMITS = {
    "received_over_samples": 1.0,
    "one_rank_peak_over_samples": 4.0,
    "unpack_s": 30.0,
    "metrics_s": 30.0,
    "plan_s": 60.0,
}


def make_sample(prompt: Prompt, index: int, tokens: int, seed: int) -> Sample:
    """A response of tokens / 2 to tokens * 3 / 2 tokens, with its text."""
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(tokens // 2, tokens * 3 // 2, (), generator=generator))
    return Sample(
        prompt.prompt_id,
        index,
        torch.randint(0, 150_000, (length,), generator=generator),
        torch.arange(length) >= tokens // 8,
        -torch.rand(length, generator=generator),
        torch.full((length,), 3, dtype=torch.int32),
        "stop",
        text="word" * length,
        reward=float(seed % 2),
        rewards={"accuracy": float(seed % 2)},
    )


class Prepared:
    """roles.Sampler, roles.Rewards and roles.Scoring: the samples are there already."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = {(sample.prompt_id, sample.index): sample for sample in samples}

    def submit(self, requests: Any) -> None:
        self.waiting = [self.samples[request.key] for request in requests]

    def poll(self, timeout_s: float | None = None) -> list[Sample]:
        finished, self.waiting = self.waiting, []
        return finished

    def running(self) -> int:
        return len(self.waiting)

    def start(self, prompts: Any) -> Prepared:
        return self

    def add(self, samples: Any) -> None: ...

    def results(self, samples: Any) -> Any:
        return samples


def requests_of(samples: int, *, group: int = 8) -> list[Request]:
    return [Request(Prompt(n // group, (1, 2), ""), n % group, n, 1.0) for n in range(samples)]


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def exchange(world: int, samples: int, tokens: int, members: int = 2) -> dict[str, Any]:
    """`world` ranks, replicas of `members`; `samples` per replica."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        arguments = (world, members, world // members * samples, tokens, folder)
        ranks = [
            context.Process(target=_exchange_rank, args=(rank, *arguments)) for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        results = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]
    assert len({result["digest"] for result in results}) == 1
    received = max(result["received"] for result in results)
    return {
        "seconds": round(max(result["seconds"] for result in results), 3),
        "sample_mb": round(results[0]["bytes"] / 1e6, 3),
        "received_over_samples": round(received / results[0]["bytes"], 3),
        "padded_all_gather_over_samples": round(
            world * results[0]["largest"] / results[0]["bytes"], 3
        ),
        "peak_over_samples": round(
            max(result["peak"] for result in results) / results[0]["bytes"], 2
        ),
        "metrics_all_reduce_ms": round(1e3 * max(result["reduce_s"] for result in results), 3),
    }


def _exchange_rank(
    rank: int, world: int, members: int, count: int, tokens: int, folder: str
) -> None:
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    requests, member = requests_of(count), Axis(members, rank % members)
    replica = Axis(world // members, rank // members)
    mine = [
        make_sample(x.prompt, x.index, tokens, x.seed)
        for x in deal(requests, replica.size)[replica.rank]
    ]
    prepared = Prepared(mine)
    share = Exchange(prepared, prepared, replica=replica, member=member)
    received: list[int] = []
    whole = dist.recv

    def counted(tensor: torch.Tensor, source: int) -> Any:
        received.append(tensor.nbytes)
        return whole(tensor, source)

    dist.recv = counted
    dist.barrier()
    before, start = peak_bytes(), time.perf_counter()
    samples = share(requests, 3)
    seconds = time.perf_counter() - start
    peak = peak_bytes() - before
    metrics = torch.zeros(NUM_METRICS, dtype=torch.float64)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(20):
        dist.all_reduce(metrics)
    reduce_s = (time.perf_counter() - start) / 20
    sizes = [0] * world
    dist.all_gather_object(sizes, pack(mine).numel() if member.first else 0)
    result = {
        "seconds": seconds,
        "received": sum(received),
        "bytes": sum(sizes),
        "largest": max(sizes),
        "peak": peak,
        "reduce_s": reduce_s,
        "digest": digest_samples(samples),
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def one_rank(replicas: int, samples: int, tokens: int) -> dict[str, Any]:
    """The work of one rank of `replicas` x MEMBERS, in CPU seconds of a thread; links' bytes follow from its sizes."""
    requests = requests_of(samples)
    mine = [
        make_sample(request.prompt, request.index, tokens, request.seed) for request in requests
    ]
    start = time.process_time()
    part = pack(mine)
    pack_s = time.process_time() - start
    total = replicas * part.numel()
    before = peak_bytes()
    # what the exchange receives into
    parts = torch.empty(total, dtype=torch.uint8).split(part.numel())
    for piece in parts:
        piece.copy_(part)
    start = time.process_time()
    gathered = [
        replace(sample, prompt_id=sample.prompt_id + number * len(requests))
        for number, piece in enumerate(parts)
        for sample in unpack(piece)
    ]
    gathered.sort(key=lambda sample: (sample.prompt_id, sample.index))
    unpack_s = time.process_time() - start
    peak = peak_bytes() - before
    start = time.process_time()
    digest = digest_samples(gathered)
    digest_s = time.process_time() - start
    by_prompt: dict[int, list[Sample]] = {}
    for sample in gathered:
        by_prompt.setdefault(sample.prompt_id, []).append(sample)
    groups = tuple(
        Group(Prompt(number, (1,), ""), tuple(group)) for number, group in by_prompt.items()
    )
    start = time.process_time()
    rollout_metrics(Rollout(groups, groups, {}, digest))
    metrics_s = time.process_time() - start
    world = replicas * MEMBERS
    return {
        "ranks": world,
        "samples": len(gathered),
        "tokens": sum(sample.tokens.numel() for sample in gathered),
        "sample_mb": round(total / 1e6, 3),
        "pack_s": round(pack_s, 3),
        "unpack_s": round(unpack_s, 3),
        "digest_s": round(digest_s, 3),
        "metrics_s": round(metrics_s, 3),
        "one_rank_peak_over_samples": round(peak / total, 2),
        "computed: received_mb": round((total - part.numel()) / 1e6, 3),
        "computed: into_a_node_mb": round((total - part.numel()) / 1e6, 3),
        "computed: padded_all_gather_mb": round(world * part.numel() / 1e6, 3),
        # every part moves by one rank at a time: once round the ring, then down the chain of members
        "computed: wire_s": round((replicas + MEMBERS - 2) * (part.numel() / RATE + HOP_S), 3),
        "computed: entries_s": round((world - 1) * HOP_S, 3),
        "computed: metrics_all_reduce_s": round(2 * log2(world) * HOP_S, 4),
        "computed: metrics_all_reduce_bytes": NUM_METRICS * 8 * 2,
    }


def plan(trainers: int, replicas: int) -> dict[str, Any]:
    """The weights of Qwen3-235B-A22B from `trainers` ranks to `replicas` engines of tensor 8."""
    overrides = [f"model.path={CONFIGS}/models/qwen3_235b_a22b", f"launch.processes={trainers}"]
    config = load_config(
        CONFIGS / "qwen3_235b_a22b.yaml", [*overrides, f"rollout.replicas={replicas}"]
    )
    before = peak_bytes()
    figures = plan_weights(config)[1]
    return {
        "ranks": trainers + replicas * config.rollout.tensor,
        "plan_s": figures["plan_seconds"],
        "peak_gb": round((peak_bytes() - before) / 1e9, 2),
        "messages": figures["num_messages"],
        "rounds": figures["num_rounds"],
        "computed: predicted_s": round(figures["predicted_seconds"], 3),
        "computed: floor_s": round(figures["floor_seconds"], 3),
    }


def check(
    *, cases: list[tuple[str, dict[str, int]]] = CASES, json_file: Path | None = None
) -> bool:
    """Runs the cases, and prints their figures. Returns whether all are within LIMITS."""
    results, failures = [], []
    print(
        machine(),
        f"computed at {RATE / 1e9:g} GB/s a stream, {HOP_S * 1e6:g} us a message",
        sep="; ",
    )
    for name, arguments in cases:
        command = [sys.executable, "-m", "benchmarks.ranks512", name, json.dumps(arguments)]
        figures = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )
        print(
            f"{name} {arguments}",
            *(f"    {key} {value}" for key, value in figures.items()),
            sep="\n",
            flush=True,
        )
        failures += [
            f"{name} {arguments}: {key}"
            for key, most in LIMITS.items()
            if figures.get(key, 0) > most
        ]
        results.append({"case": name, **arguments, **figures})
    print("all within limits" if not failures else "\n".join(failures), LIMITS)
    if json_file:
        json_file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return not failures


if __name__ == "__main__":
    measure = {"exchange": exchange, "one_rank": one_rank, "plan": plan}[sys.argv[1]]
    torch.set_num_threads(1)
    print(json.dumps(measure(**json.loads(sys.argv[2]))))
