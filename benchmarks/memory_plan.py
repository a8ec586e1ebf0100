"""The plan of memory against bytes alive on a device that a CPU stands for.

    python -m benchmarks.memory_plan [--only TEXT] [--larger] [--heads | --figure CONFIG FILE]

Four ranks build a trainer for each layout, and every storage on the device is counted (benchmarks/memory_phases.py).
Weights, gradients and optimizer state of the plan must be equal, the peaks of passes and updates within 10%. The
layers are Megatron-Core's local ones, whose kernels save other tensors than Transformer Engine's: LOCAL has their bytes,
fitted to peaks of one rank. Then a colocated rank with an engine's memory beside it, phase by phase.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from benchmarks import memory_phases
from benchmarks.memory_phases import DEVICE, Device
from megarl.config.device_memory import Kernels, LayerBytes
from megarl.config.load import load_config, parse_config
from megarl.config.schema import Config
from megarl.layout import Layout
from megarl.weights.plan.memory import describe_memory, plan_memory
from megarl.weights.plan.memory_phases import PHASES, memory_by_phase
from megarl.weights.plan.memory_sizes import Gpu, training_state

ROOT = Path(__file__).resolve().parents[1]
WORLD = 4
ROW = 128
LOCAL = Kernels(
    kept=LayerBytes(hidden=16, query=12, key=10, mlp=10, expert_hidden=2, expert_mlp=12),
    backward=LayerBytes(hidden=4, query=0, key=0, mlp=4, expert_hidden=4, expert_mlp=4),
    forward=LayerBytes(hidden=16, query=4, key=4, mlp=8, expert_hidden=4, expert_mlp=8),
    tile=4 << 20,
    head_kept=8,
    head_forward=4,
    head_backward=14,
)
COUNTED = Gpu("counted", 1 << 40, LOCAL, has_overheads=False)
DENSE = {
    "layers": 4,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 64,
    "intermediate": 512,
    "vocab": 1024,
    "tied": False,
    "tokenizer": "none",
}
SPARSE = {
    **DENSE,
    "family": "qwen3_moe",
    "experts": 8,
    "experts_per_token": 2,
    "moe_intermediate": 256,
}
SMALL = {
    **DENSE,
    "hidden": 512,
    "heads": 8,
    "kv_heads": 8,
    "intermediate": 1536,
    "layers": 8,
    "vocab": 16384,
}
FULL = {"recompute": "full"}


@dataclass(frozen=True)
class Case:
    """A model in a layout of four ranks."""

    name: str
    create: dict[str, Any]
    parallel: dict[str, int]
    train: dict[str, Any]
    tokens: int = 512  # of a micro-batch

    @property
    def microbatches(self) -> int:
        """Of each data rank: as many as fill the pipeline."""
        return self.parallel.get("pipeline", 1) * self.parallel.get("virtual_pipeline", 1)

    @property
    def config(self) -> Config:
        data = WORLD // (
            self.parallel.get("tensor", 1)
            * self.parallel.get("pipeline", 1)
            * self.parallel.get("context", 1)
        )
        rows = self.microbatches * data * self.tokens // ROW
        train = {
            "dtype": "bf16",
            "max_tokens_per_microbatch": self.tokens,
            "prompts_per_step": rows,
        }
        return parse_config(
            {
                "stage": "sft",
                "model": {"create": self.create},
                "parallel": self.parallel,
                "train": train | self.train,
                "rollout": {"max_prompt_tokens": ROW // 2, "max_tokens": ROW // 2},
                "launch": {"processes": WORLD},
                "checkpoint": {"resume": "never"},
            }
        )


CASES = [
    Case("dense, data 4", DENSE, {}, {}),
    Case("dense, data 4, fp32", DENSE, {}, {"dtype": "fp32"}),
    Case("dense, tensor 2", DENSE, {"tensor": 2}, {}),
    Case("dense, tensor 4, full recompute", DENSE, {"tensor": 4}, FULL),
    Case("dense, pipeline 2", DENSE, {"pipeline": 2}, {}),
    Case("dense, pipeline 4, tied", {**DENSE, "tied": True}, {"pipeline": 4}, {}),
    Case("dense, tensor 2, pipeline 2, full recompute", DENSE, {"tensor": 2, "pipeline": 2}, FULL),
    Case("dense, pipeline 2, virtual 2", DENSE, {"pipeline": 2, "virtual_pipeline": 2}, {}),
    Case("dense, context 2", DENSE, {"context": 2}, {}),
    Case("experts, expert 4", SPARSE, {"expert": 4}, {}),
    Case("experts, tensor 2, expert 2", SPARSE, {"tensor": 2, "expert": 2}, FULL),
    Case("experts, tensor 2, expert tensor 2", SPARSE, {"tensor": 2, "expert_tensor": 2}, {}),
    Case("experts, pipeline 2, expert 2", SPARSE, {"pipeline": 2, "expert": 2}, {}),
]
LARGER = [
    Case("46M, tensor 2", SMALL, {"tensor": 2}, {}, tokens=1024),
    Case("46M, pipeline 2, full recompute", SMALL, {"pipeline": 2}, FULL, tokens=1024),
]


def _batch(rows: int, vocab: int) -> Any:
    from megarl.types import TokenBatch

    total = rows * ROW
    tokens = torch.randint(vocab, (total,), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(total, dtype=torch.bool)
    mask[ROW - 1 :: ROW] = False
    starts = torch.arange(0, total + 1, ROW, dtype=torch.int32)
    return TokenBatch(
        tokens=tokens, labels=tokens.roll(-1), mask=mask, cu_seqlens=starts, temperature=1.0
    )


def measure(case: Case, folder: Path, rank: int) -> dict[str, int]:
    """Bytes of this rank: of weights, gradients, optimizer state, and at the peaks of phases."""
    from megarl.checkpoint.rank_state import parts_of
    from megarl.commands.random_model import create_model
    from megarl.models.registry import read_model
    from megarl.stages.sft import train_supervised
    from megarl.trainer.trainer import Trainer

    config = case.config
    assert config.model.create
    path = create_model(config.model.create, folder / f"{rank}")
    shape = read_model(path)
    layout = Layout.of(config.parallel.sizes, WORLD, rank)
    device = Device()
    peaks: dict[str, int] = {}
    with device.with_host():
        with device.peak("startup", peaks):
            trainer = Trainer.build(shape, layout, train=config.train, folder=path, device=DEVICE)
        batch = _batch(config.train.prompts_per_step, shape.vocab)
        train_supervised(trainer, batch)  # the moments exist from now on
        gc.collect()
        outside = device.bytes()
        with device.peak("logprobs", peaks):
            trainer.forward(batch)
        with device.peak("update", peaks):
            train_supervised(trainer, batch)
        gc.collect()
    chunks: Any = trainer.model
    buffers = [b for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    optimizer = 0
    for part in parts_of(trainer.optimizer):
        inner: Any = getattr(part, "optimizer", None)
        for group in inner.param_groups if inner else ():
            mains = group["params"] if config.train.dtype == "bf16" else ()
            optimizer += sum(4 * x.numel() for x in mains)
            for x in group["params"]:
                state = inner.state[x]
                optimizer += state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
    sizes = {
        "weights": sum(buffer.param_data.nbytes for buffer in buffers),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": optimizer,
    }
    trainer.close()
    # the batch, rotary frequencies, step counters, what a pipeline last sent
    beside = outside - sum(sizes.values())
    return sizes | {name: peak - beside for name, peak in peaks.items()} | {"beside": beside}


def _rank(rank: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    found = {}
    for case in CASES + LARGER:
        if case.name in names:
            with tempfile.TemporaryDirectory() as models:
                found[case.name] = measure(case, Path(models), rank)
            if not rank:
                print(case.name, found[case.name], flush=True)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def start(folder: str, names: list[str]) -> None:
    # imported once, before the fork
    from megarl.trainer.trainer import Trainer

    assert Trainer
    start_processes(_rank, (folder, names), nprocs=WORLD, start_method="fork")


def run(cases: list[Case]) -> dict[str, list[dict[str, int]]]:
    """Case -> the bytes of each rank."""
    names = [case.name for case in cases]
    with tempfile.TemporaryDirectory() as folder:
        # in a process of its own: a fork of one with threads may hang
        program = f"from benchmarks import memory_plan; memory_plan.start({folder!r}, {names!r})"
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, check=True, timeout=1800
        )
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(WORLD)]
    return {name: [found[name] for found in ranks] for name in names}


def planned(case: Case) -> dict[str, Any]:
    """The plan's bytes of the state of each rank, and of the peaks of the fullest rank."""
    from megarl.config.validate import model_shape

    config = case.config
    shape = model_shape(config)
    states = [
        vars(training_state(config, shape, Layout.of(config.parallel.sizes, WORLD, rank)))
        for rank in range(WORLD)
    ]
    plan = memory_by_phase(config, COUNTED)
    peaks = {name: peak.peak_bytes for name, peak in plan.trainer.items()}
    # gloo copies gradients to reduce them; NCCL does not
    state = max(sum(state.values()) + state["gradients"] for state in states)
    peaks["update"] = max(peaks["update"], state)
    return {"states": states, "peaks": peaks}


def compare(case: Case, ranks: list[dict[str, int]]) -> dict[str, tuple[int, int]]:
    """Name -> (bytes counted, bytes of the plan), of the fullest rank of each stage, or of all."""
    plan = planned(case)
    rows = {}
    stages = case.parallel.get("pipeline", 1)
    for stage in range(stages):
        inside = range(stage * WORLD // stages, (stage + 1) * WORLD // stages)
        for kind in ("weights", "gradients", "optimizer"):
            counted = max(ranks[rank][kind] for rank in inside)
            rows[f"{kind}, stage {stage}"] = (counted, plan["states"][inside[0]][kind])
    for phase in ("startup", "logprobs", "update"):
        rows[phase] = (max(rank[phase] for rank in ranks), plan["peaks"][phase])
    return rows


def colocated(model: str, offload: str) -> dict[str, tuple[int, int]]:
    """Phase -> (bytes counted, bytes of the plan), of a rank that shares its device with an engine."""
    create, parallel, _ = memory_phases.MODELS[model]
    kinds, level = memory_phases.OFFLOAD[offload]
    counted = memory_phases.run(ROOT, model, offload)
    tokens = 256 // (1 if "tensor" in parallel else 2)  # of a data rank
    config = parse_config(
        {
            "model": {"create": create},
            "parallel": parallel,
            "train": {
                "dtype": "bf16",
                "offload": kinds,
                "max_tokens_per_microbatch": tokens,
                "prompts_per_step": 2,
            },
            "rollout": {
                "gpu_memory_utilization": memory_phases.UTILIZATION,
                "sleep_level": level,
                "samples_per_prompt": 1,
                "max_prompt_tokens": 64,
                "max_tokens": 64,
            },
            "sync": {"round_bytes": 1 << 20},
            "launch": {"processes": 2},
            "checkpoint": {"resume": "never"},
        }
    )
    device = replace(COUNTED, bytes=counted["device"])
    plan = memory_by_phase(config, device).trainer
    peaks = {phase: peak.peak_bytes for phase, peak in plan.items()}
    # torch's Adam has two fp32 copies of the largest parameter, the embedding; a GPU's has none
    embedding = create["vocab"] * create["hidden"] // parallel.get("tensor", 1)
    peaks["train"] = max(peaks["train"], peaks["save"] + 2 * 4 * embedding)
    return {
        phase: (counted[phase], peaks[phase])
        for phase in memory_phases.PHASES
        if phase in plan and counted[phase]
    }


HEAD = "# Memory of each phase, by"
SHIPPED = {  # config -> folder below configs/models
    "examples/math_8gpu/math_8gpu.yaml": "qwen3_8b",
    "configs/gpu/qwen3_30b_a3b_8gpu.yaml": "qwen3_30b_a3b",
    "configs/gpu/qwen3_235b_a22b_64gpu.yaml": "qwen3_235b_a22b",
    "configs/qwen3_235b_a22b.yaml": "qwen3_235b_a22b",
    "configs/gpt_oss_120b.yaml": "gpt_oss_120b",
    "configs/glm_4_5.yaml": "glm_4_5",
    "configs/llama_3_1_405b.yaml": "llama_3_1_405b",
    "configs/deepseek_v3.yaml": "deepseek_v3",
    "configs/kimi_k2.yaml": "kimi_k2",
}


def head(file: str) -> str:
    """The comment of a shipped config: what `megarl plan` prints."""
    config = load_config(ROOT / file, [f"model.path={ROOT}/configs/models/{SHIPPED[file]}"])
    text = describe_memory(plan_memory(config, gpu=config.launch.gpu or "h100"))
    lines = [f"{HEAD} `megarl plan {file}`; estimated, not measured:", *text.split("\n")]
    return "\n".join([lines[0], *(f"#   {line}".rstrip() for line in lines[1:])]) + "\n"


def write_heads() -> None:
    for file in SHIPPED:
        path = ROOT / file
        text = path.read_text()
        before = text.partition(HEAD)[0]
        rest = text[text.index("run: ") :]
        if HEAD not in text:
            before = text[: text.index("run: ")]
        path.write_text(before + head(file) + rest)


def draw(file: str, image: Path) -> None:
    """Draws the phases of the fullest rank of both sides as stacked bars, and the GPU's limit as a line."""
    import matplotlib.pyplot as plt

    config = load_config(ROOT / file, [f"model.path={ROOT}/configs/models/{SHIPPED[file]}"])
    plan = plan_memory(config, gpu=config.launch.gpu or "h100")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(9, 5), layout="constrained")
    for axis, (side, peaks) in zip(
        axes, {"trainer": plan.trainer, "engine": plan.engine}.items(), strict=True
    ):
        phases = [phase for phase in PHASES.split() if phase in peaks and phase != "train"]
        bottom = [0.0] * len(phases)
        for component in next(iter(peaks.values())).components:
            sizes = [peaks[phase].components[component] / 1e9 for phase in phases]
            if any(sizes):
                axis.bar(phases, sizes, bottom=bottom, label=component.replace("_", " "))
            bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
        axis.axhline(plan.gpu.bytes / 1e9, color="black", linestyle="--", linewidth=1)
        axis.set_title(f"{side}, fullest rank" + " (its own part)" * (side == "engine"))
        axis.tick_params(axis="x", rotation=40)
        axis.set_ylim(0, plan.gpu.bytes / 1e9 * 1.3)
        axis.legend(ncols=3, fontsize=8, loc="upper center", frameon=False)
    axes[0].set_ylabel(f"GB; dashed: {plan.gpu.name.upper()}")
    figure.savefig(image, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_plan", description=__doc__)
    parser.add_argument("--larger", action="store_true", help="also the models of 46M parameters")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only the cases that contain TEXT"
    )
    parser.add_argument(
        "--heads",
        action="store_true",
        help="only write the plans into the heads of shipped configs",
    )
    parser.add_argument("--figure", nargs=2, metavar=("CONFIG", "FILE"), help="only draw a plan")
    args = parser.parse_args()
    if args.figure:
        draw(args.figure[0], Path(args.figure[1]))
        return 0
    if args.heads:
        write_heads()
        return 0
    cases = [case for case in CASES + LARGER * args.larger if args.only in case.name]
    found = run(cases)
    print("MB on the fullest rank of four, bf16: counted, of the plan\n")
    tables = {case.name: compare(case, found[case.name]) for case in cases}
    for model, offload in product(memory_phases.MODELS, memory_phases.OFFLOAD):
        name = f"shared with an engine: {model}, {offload}"
        if args.only in name:
            tables[name] = colocated(model, offload)
    for name, rows in tables.items():
        print(name)
        for what, (counted, plan) in rows.items():
            print(
                f"  {what:22}{counted / 1e6:10.3f}{plan / 1e6:10.3f}{plan / counted - 1:+8.1%}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
