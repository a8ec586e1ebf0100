"""Updates on four gloo ranks with and without gradients that are reduced during the backward pass, as JSON.

python overlap_ranks.py RESULTS.json MODEL...
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.multiprocessing as mp
from trainer_cases import random_batch
from trainer_ranks import WORLD, Bench, config_of, fingerprints, join, replicas_differ, run_checks

from megarl.config.schema import Config

CASES: dict[str, dict[str, int]] = {  # model: layout
    "qwen3_untied": {},  # 4 data-parallel ranks
    "qwen3": {"tensor": 2},  # and 2
    "qwen3_moe": {"tensor": 2, "expert": 2},
    "qwen3@5": {"pipeline": 2, "virtual_pipeline": 2},  # stages of several chunks
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap_grad_reduce": True},
    "buckets": {"overlap_grad_reduce": True, "bucket_size": 3000},
    "kept outputs": {"deallocate_pipeline_outputs": False},
}


def check_overlap(bench: Bench, models: list[str]) -> list[dict[str, Any]]:
    found = []
    for model in models:
        parallel = CASES[model]
        case: dict[str, Any] = {"model": model, "parallel": parallel}
        for name, options in OPTIONS.items():
            sections = config_of(parallel, clip_grad=0.0).model_dump(exclude_unset=True)
            config = Config.model_validate(sections | {"trainer": {"megatron_options": options}})
            policy = bench.policy(model, config)
            scored = policy.score(random_batch(num_rows=12))
            updates = [policy.update(scored).updates[0] for _ in range(3)]
            case[name] = {
                "loss": [update.loss for update in updates],
                "grad_norm": [update.grad_norm for update in updates],
                "weights": fingerprints(policy),
                "replicas_differ": replicas_differ(policy),
                "buckets": sum(len(chunk.bucket_groups) for chunk in policy.trainer.model),
            }
        found.append(case)
    bench.close()
    return found


def work(rank: int, results: str, models: list[str], folder: str) -> None:
    check = partial(check_overlap, models=models)
    run_checks(join(rank, WORLD, folder), {"overlap": check}, results)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        mp.spawn(work, (str(Path(sys.argv[1]).absolute()), sys.argv[2:], folder), nprocs=WORLD)
