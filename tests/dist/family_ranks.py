"""Every family in the layouts that it has to run in, on gloo ranks; rank 0 writes what they found as JSON.

python family_ranks.py RESULTS.json each_once       4 ranks: every family and every layout, once at least
python family_ranks.py RESULTS.json every           4 ranks: every pair of a family and a layout
python family_ranks.py RESULTS.json all_axes        8 ranks: all axes at once
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from trainer_cases import Policy, save_model
from trainer_ranks import Bench, config_of, join, measure

from megarl.checkpoint.hf_files import export_hf
from megarl.models.registry import fp32_tensors, hf_shapes
from megarl.platform.device import DTYPES
from megarl.weights.sync.publish import WeightFormat
from megarl.weights.sync.transports.collective import Collective

DENSE = ["llama@5", "qwen2@5", "qwen3@5", "qwen3_untied@5"]  # 5 layers: no even stages
SPARSE = ["qwen3_moe@5", "mixtral@5", "deepseek_v3@5", "deepseek_v3_direct@5", "glm4_moe@5"]
DENSE_LAYOUTS = [{"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}]
SPARSE_LAYOUTS = [
    *DENSE_LAYOUTS,
    {"expert": 2},
    {"tensor": 2, "expert": 2},
    {"tensor": 2, "expert_tensor": 2},
]
GPT_OSS = [
    *SPARSE_LAYOUTS[:5],
    {"context": 2, "expert": 2},
]  # Megatron's biased experts are not split among ranks
WORLDS = {"each_once": 4, "every": 4, "all_axes": 8}  # ranks
ALL_AXES = {"tensor": 2, "pipeline": 2, "expert": 2}


EACH_ONCE = [
    ("llama@5", {"pipeline": 2, "virtual_pipeline": 2}),
    ("qwen2@5", {"tensor": 2}),
    ("qwen3@5", {"pipeline": 2}),
    ("qwen3_untied@5", {"tensor": 2}),
    ("qwen3_moe@5", {"tensor": 2, "expert": 2}),
    ("mixtral@5", {"tensor": 2, "expert_tensor": 2}),
    ("deepseek_v3@5", {"pipeline": 2, "virtual_pipeline": 2}),
    ("deepseek_v3_direct@5", {"expert": 2}),
    ("glm4_moe@5", {"tensor": 2}),
    ("gpt_oss@5", {"context": 2, "expert": 2}),
    ("gpt_oss@5", {"tensor": 2, "expert": 2}),
    ("qwen3_yarn@5", {"tensor": 2}),
]


def layouts(which: str) -> list[tuple[str, dict[str, int]]]:
    if which == "each_once":
        return EACH_ONCE
    if which == "all_axes":
        every = [(model, ALL_AXES) for model in [*SPARSE, "gpt_oss@5"]]
        return [*every, ("deepseek_v3@5", ALL_AXES | {"virtual_pipeline": 2})]
    dense = [(model, parallel) for model in DENSE for parallel in DENSE_LAYOUTS]
    sparse = [(model, parallel) for model in SPARSE for parallel in SPARSE_LAYOUTS]
    return (
        dense
        + sparse
        + [("gpt_oss@5", parallel) for parallel in GPT_OSS]
        + [("qwen3_yarn@5", {"tensor": 2})]
    )


def round_trip(policy: Policy) -> list[str]:
    """Names of the tensors that HF -> Megatron -> HF gave back otherwise; on every rank."""
    trainer, origin = policy.trainer, policy.folder
    back = origin.with_name("back")
    export_hf(
        back,
        origin=origin,
        weights=WeightFormat(
            hf_shapes(trainer.shape), DTYPES[trainer.train.dtype], fp32_tensors(trainer.shape)
        ),
        sources=trainer.tensors.by_rank(),
        parameters=trainer.parameters_by_name,
        transport=Collective(),
        file_bytes=1 << 16,  # several files
    )
    before, after = _tensors(origin), _tensors(back)
    dist.barrier()
    wrong = [name for name in before if name not in after or not _equal(before[name], after[name])]
    return wrong + [name for name in after if name not in before]


def round_trips_in_bf16(bench: Bench, which: str) -> dict[str, list[str]]:
    """The layout that shards most, with router corrections left in fp32."""
    parallel = ALL_AXES if which == "all_axes" else {"tensor": 2, "expert": 2}
    models = ["deepseek_v3@5"] if which == "each_once" else SPARSE
    return {
        model: round_trip(bench.policy(in_bf16(bench, model), config_of(parallel, dtype="bf16")))
        for model in models
    }


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def in_bf16(bench: Bench, model: str) -> str:
    """The name of the checkpoint in bf16, but for router corrections, which published checkpoints keep in fp32."""
    folder = bench.folder / f"{model}-bf16"
    if dist.get_rank() == 0:
        shutil.copytree(bench.folder / model, folder)
        found = {
            name: x if name.endswith(("correction_bias", "expert_bias")) else x.bfloat16()
            for name, x in _tensors(bench.folder / model).items()
        }
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    return folder.name


def work(rank: int, results: str, folder: str, which: str) -> None:
    bench, start = join(rank, WORLDS[which], folder), perf_counter()
    found = {
        "layouts": measure(bench, layouts(which), round_trip),
        "bf16": round_trips_in_bf16(bench, which),
    }
    if rank == 0:
        print(f"{len(layouts(which))} layouts: {perf_counter() - start:.1f} s", flush=True)
        Path(results).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)  # OpenMP's threads do not survive the fork
    with TemporaryDirectory() as scratch:
        for name in [*DENSE, *SPARSE, "gpt_oss@5", "qwen3_yarn@5"]:
            save_model(name, Path(scratch))
        mp.start_processes(
            work, (sys.argv[1], scratch, sys.argv[2]), WORLDS[sys.argv[2]], start_method="fork"
        )
