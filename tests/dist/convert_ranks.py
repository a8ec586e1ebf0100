"""Four ranks that load converted checkpoints in layouts of their own, and save as Megatron saves.

python convert_ranks.py RESULTS FOLDER MODEL...      FOLDER has MODEL (HF) and MODEL-megatron; leaves MODEL-saved
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from trainer_cases import ask, load_model, random_batch
from trainer_ranks import config_of, fingerprints, join

WORLD = 4
LAYOUTS = {"gpt_oss": {"tensor": 2, "expert": 2}}
OTHERS = {"tensor": 2, "pipeline": 2}


def work(rank: int, results: str, folder: str, models: list[str]) -> None:
    from megatron.core import dist_checkpointing  # after megarl has prepared it for a CPU

    bench, found = join(rank, WORLD, folder), {}
    for model in models:
        config = config_of(LAYOUTS.get(model, OTHERS))
        expected = fingerprints(bench.policy(model, config))
        policy = bench.policy(f"{model}-megatron", config)
        differ: list[list[str]] = [[]] * WORLD
        mine = fingerprints(policy)
        dist.all_gather_object(differ, [name for name in expected if expected[name] != mine[name]])
        scored = policy.score(random_batch(num_rows=8))
        saved = bench.folder / f"{model}-saved"
        if rank == 0:
            saved.mkdir()
            oracle = ask(load_model(bench.folder / model), scored, config)
            error = float((scored.old_logprobs - oracle.logprobs).abs().max())
            names = [name for rank_names in differ for name in rank_names]
            found[model] = {"differ": names, "error": error, "count": len(expected)}
        dist.barrier()
        (chunk,) = policy.trainer.model
        dist_checkpointing.save(chunk.module.sharded_state_dict(), str(saved))
    if rank == 0:
        Path(results).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    mp.start_processes(work, (sys.argv[1], sys.argv[2], sys.argv[3:]), WORLD, start_method="fork")
