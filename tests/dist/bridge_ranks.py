"""Families without a table, through Megatron-Bridge, on two gloo ranks; rank 0 writes what they found as JSON.

python bridge_ranks.py RESULTS.json [CHECK...]      with te_standin/ on the path, where Bridge is installed and no GPU is
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from actor_cases import save_model
from actor_ranks import Bench, config_of, join, measure
from family_ranks import round_trip

from megarl.actor.actor import Actor
from megarl.actor.bridged import Bridged, record
from megarl.weights.mapping import Box
from megarl.weights.models import hf_shapes

WORLD = 2
TP2, PP2, VPP2, EP2 = {"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}, {"expert": 2}
WITH_TABLES = {
    "qwen3@5": [{}, TP2, PP2, VPP2],
    "llama@5": [TP2, PP2],
    "qwen2@5": [TP2],
    "qwen3_moe@5": [TP2, PP2, EP2, TP2 | EP2, TP2 | {"expert_tensor": 2}],
    "deepseek_v3@3": [TP2, EP2],
}
LAYOUTS = {"mistral@5": [TP2, PP2, VPP2], "hy_v3@5": [TP2, PP2, EP2]}
WITHOUT = [(model, parallel) for model, layouts in LAYOUTS.items() for parallel in layouts]


def compare_tables(bench: Bench) -> dict[str, Any]:
    """What Bridge's conversion was seen to do against what the family's own table says, of all ranks."""
    found = {}
    for model, layouts in WITH_TABLES.items():
        for parallel in layouts:
            actor = bench.actor(model, config_of(parallel))
            wrong = [str(box) for box in _disputed(actor)]
            everywhere: list[list[str]] = [[]] * WORLD
            dist.all_gather_object(everywhere, wrong)
            found[f"{model} {parallel}"] = [box for boxes in everywhere for box in boxes][:4]
    return found


def _disputed(actor: Actor) -> list[Box]:
    assert actor.config.model.path is not None
    shape = replace(actor.shape, bridge=Path(actor.config.model.path))
    bridged = Bridged.of(shape, actor.layout, dtype=torch.float32, dispatcher="alltoall", use_te=False)
    chunks: Any = [chunk.module for chunk in actor.model]
    recorded = record(chunks, bridged.bridge, hf_shapes(actor.shape), actor.layout.ep)
    table = actor.boxes_of_ranks()[actor.layout.rank]
    return sorted({_normal(box) for box in recorded} ^ {_normal(box) for box in table}, key=str)


def _normal(box: Box) -> Box:
    """Strides of dims of one element say nothing."""
    return replace(box, strides=tuple(0 if n == 1 else s for n, s in zip(box.shape, box.strides, strict=True)))


def families_without(bench: Bench) -> list[dict[str, Any]]:
    return measure(bench, WITHOUT, round_trip)


CHECKS: dict[str, Callable[[Bench], Any]] = {"tables": compare_tables, "families": families_without}


def work(rank: int, results: str, folder: str, checks: list[str]) -> None:
    bench = join(rank, WORLD, folder)
    found = {}
    for name in checks:
        start = perf_counter()
        found[name] = CHECKS[name](bench)
        if rank == 0:
            print(f"{name}: {perf_counter() - start:.1f} s", flush=True)
    if rank == 0:
        Path(results).write_text(json.dumps(found, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        mp.spawn(work, (sys.argv[1], scratch, sys.argv[2:] or list(CHECKS)), WORLD)
