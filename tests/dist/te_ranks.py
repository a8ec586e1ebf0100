"""Transformer Engine's layers against Megatron's local ones, on two gloo ranks that share one import.

python te_ranks.py RESULTS.json [CHECK]...      rank 0 writes what the checks found on each rank as JSON

Each rank first runs its half of the cases of one rank, and then both run those of two ranks together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import te_standin

if __name__ == "__main__":
    te_standin.install()  # before Megatron-Core is imported

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from te_cases import (
    FUSED,
    MODELS_HERE,
    WORLD,
    Bench,
    check_adam,
    check_bf16,
    check_faults,
    check_features,
    check_fp8_layers,
    check_fp8_layouts,
    check_fp8_models,
    compare,
)
from te_moves import check_checkpoints, check_exports, check_prediction, check_sync
from trainer_cases import random_batch, save_model

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss")
DP2: dict[str, int] = {}
TP2 = {"tensor": 2}
PP2 = {"pipeline": 2}
EP2 = {"expert": 2}
CP2 = {"context": 2}
DENSE = FAMILIES[:3]
SPARSE = FAMILIES[3:]
LAYOUTS = [
    *((model, parallel) for model in FAMILIES for parallel in (DP2, TP2, PP2)),
    *((model, CP2) for model in FAMILIES[:-1]),  # sinks have no kernel for it, and are refused
    *((model, EP2) for model in SPARSE),
    ("qwen3_moe", TP2 | EP2),
]
Check = Callable[[Bench], Any]


def check_families(bench: Bench) -> list[dict[str, Any]]:
    return [compare(bench, model, {}) for model in FAMILIES[bench.number :: WORLD]]


def check_empty_experts(bench: Bench) -> list[dict[str, Any]]:
    batch = random_batch(num_rows=1, longest=5)
    return [compare(bench, "qwen3_moe_16_experts", {}, batch)] if bench.number else []


def check_permutation(bench: Bench) -> list[dict[str, Any]]:
    """Tokens are permuted by the kernels of the default on a GPU, in Triton's interpreter."""
    batch = random_batch(num_rows=1, longest=5)
    return [] if bench.number else [compare(bench, "qwen3_moe", {}, batch, options=FUSED)]


def check_layouts(bench: Bench) -> list[dict[str, Any]]:
    return [compare(bench, model, parallel) for model, parallel in LAYOUTS]


ALONE: dict[str, Check] = {
    "families": check_families,
    "empty_experts": check_empty_experts,
    "permutation": check_permutation,
    "bf16": partial(check_bf16, models=FAMILIES),
    "fp8_layers": check_fp8_layers,
    "fp8_models": check_fp8_models,
    "adam": check_adam,
    "features": check_features,
    "prediction": check_prediction,
    "faults": check_faults,
}
TOGETHER: dict[str, Check] = {
    "layouts": check_layouts,
    "fp8_layouts": check_fp8_layouts,
    "checkpoints": check_checkpoints,
    "exports": check_exports,
    "sync": check_sync,
}


def work(rank: int, results: str, folder: str, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for checks, world in ((ALONE, 1), (TOGETHER, WORLD)):
        if world == 1:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        else:
            store = dist.FileStore(f"{folder}/store", world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        bench = Bench(Path(folder), rank)
        for name in names:
            if name in checks:
                start = perf_counter()
                found[name] = checks[name](bench)
                print(f"{name}, rank {rank}: {perf_counter() - start:.1f} s", flush=True)
        if world > 1:
            by_rank: list[Any] = [None] * world
            dist.all_gather_object(by_rank, found)
            if rank == 0:
                Path(results).write_text(json.dumps(by_rank))
        dist.destroy_process_group()


def main(results: str, *names: str) -> None:
    with TemporaryDirectory() as folder:
        for model in MODELS_HERE:
            save_model(model, Path(folder))
        mp.start_processes(
            work, (results, folder, names or (*ALONE, *TOGETHER)), WORLD, start_method="fork"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
