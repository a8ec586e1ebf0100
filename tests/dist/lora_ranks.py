"""One job of four gloo ranks: LoRA in many layouts, and its checkpoints; rank 0 writes what they found as JSON.

python lora_ranks.py RESULTS.json [CHECK]...
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from checkpoint_ranks import Cursor, state_of
from lora_cases import RANK, LoraOracle, adapter_shapes, random_adapter, tensors_by_name
from trainer_cases import load_model, random_batch
from trainer_ranks import Bench, join, run_checks

from megarl.checkpoint.rank_state import parts_of
from megarl.checkpoint.state import Checkpoints
from megarl.config.schema import Lora, Train
from megarl.layout import Layout, Parallel
from megarl.models.registry import read_model
from megarl.stages.sft import train_supervised
from megarl.trainer.trainer import Trainer
from megarl.types import ObjectiveState

WORLD, STEPS = 4, 2
FEW = [
    ("qwen3", {}),
    ("qwen3", {"tensor": 2, "pipeline": 2}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"tensor": 2, "expert": 2}),
    ("qwen3_moe", {"tensor": 2, "expert_tensor": 2}),
]
MORE = [
    ("qwen3", {"tensor": 2, "context": 2}),
    ("qwen3@5", {"pipeline": 2, "virtual_pipeline": 2}),
    ("qwen3_moe", {"tensor": 2}),
    ("qwen3_moe", {"expert": 4}),
    ("qwen3_moe", {"pipeline": 2, "expert": 2}),
    ("qwen3_moe", {"tensor": 2, "pipeline": 2, "expert_tensor": 2}),
    ("qwen2", {"tensor": 2}),  # biases
    ("deepseek_v3@3", {"tensor": 2, "pipeline": 2}),
    ("glm4_moe", {"tensor": 2, "expert": 2}),
    ("mixtral", {"tensor": 2, "expert": 2}),
    ("gpt_oss", {"tensor": 2}),
]


def build(
    bench: Bench, model: str, parallel: dict[str, int], *, path: str | None, **train: Any
) -> Trainer:
    folder = bench.saved(model)
    layout = Layout.of(Parallel(**parallel), WORLD, dist.get_rank())
    settings = Train.model_validate(
        {"dtype": "fp32", "lr": 1e-2, "max_tokens_per_microbatch": 64, **train}
    )
    lora = Lora(rank=RANK, alpha=5.0, path=path)
    return Trainer.build(
        read_model(folder),
        layout,
        train=settings,
        folder=folder,
        device=torch.device("cpu"),
        lora=lora,
    )


def adapter_of(bench: Bench, model: str) -> Path:
    """A random adapter of the model, with B other than 0; written by rank 0."""
    folder = bench.folder / f"{model}-adapter"
    if dist.get_rank() == 0 and not folder.exists():
        random_adapter(bench.folder / model, folder)
    dist.barrier()
    return folder


def replicas_differ(trainer: Trainer) -> list[str]:
    """Parts of adapters that are not bit-equal on all ranks that hold them; and those that no rank holds."""
    assert trainer.adapters is not None
    everywhere: list[Any] = [None] * WORLD
    dist.all_gather_object(
        everywhere, tensors_by_name(trainer.adapters.tensors.slices, trainer.adapters.parameters)
    )
    seen: dict[str, list[torch.Tensor]] = {}
    for rank in everywhere:
        for name, value in rank.items():
            seen.setdefault(name, []).append(value)
    return [
        name
        for name, values in seen.items()
        if any(not torch.equal(values[0], x) for x in values[1:])
    ]


def memory_of(trainer: Trainer) -> dict[str, int]:
    """Elements on all ranks: adapters, all others, gradients, optimizer state."""
    assert trainer.adapters is not None
    buffers = [b for chunk in trainer.model for b in chunk.buffers + chunk.expert_parallel_buffers]
    states = [x for part in parts_of(trainer.optimizer) if getattr(part, "optimizer", None)
              for state in part.optimizer.state.values() for key, x in state.items() if key != "step"]  # fmt: skip
    counts = torch.tensor(
        [
            sum(x.numel() for x in trainer.adapters.parameters.values()),
            sum(x.numel() for x in trainer.parameters_by_name().values()),
            sum(buffer.grad_data.numel() for buffer in buffers),
            sum(x.numel() for x in states),
        ]
    )
    dist.all_reduce(counts)
    return dict(zip(("adapters", "base", "gradients", "state"), counts.tolist(), strict=True))


def measure(bench: Bench, layouts: list[tuple[str, dict[str, int]]]) -> list[dict[str, Any]]:
    found, oracles = [], {}
    for model, parallel in layouts:
        bench.saved(model)
        adapter, batch = adapter_of(bench, model), random_batch(num_rows=8)
        trainer = build(bench, model, parallel, path=str(adapter))
        assert trainer.adapters is not None
        if dist.get_rank() == 0 and model not in oracles:
            oracles[model] = LoraOracle(load_model(bench.folder / model), adapter).steps(
                batch, trainer.train, STEPS
            )
        before, mine = state_of(trainer), trainer.logprobs(batch)
        base = {name: x.clone() for name, x in trainer.parameters_by_name().items()}
        merged = trainer.merged_parameters()
        merged = {name: merged[name].clone() for name in merged}
        with trainer.adapters.off(), torch.no_grad():
            of_base = trainer.logprobs(batch)
            for name, x in trainer.parameters_by_name().items():
                x.copy_(merged[name])
            of_merged = trainer.logprobs(batch)
            for name, x in trainer.parameters_by_name().items():
                x.copy_(base[name])
        differ = replicas_differ(trainer)
        steps = [train_supervised(trainer, batch).updates[0] for _ in range(STEPS)]
        same = all(torch.equal(x, base[name]) for name, x in trainer.parameters_by_name().items())
        found.append(
            {
                "model": model,
                "parallel": parallel,
                "steps": [[step.loss, step.grad_norm] for step in steps],
                "merged": float((mine - of_merged).abs().max()),
                "moved": float((mine - of_base).abs().max()),
                "differ": differ + replicas_differ(trainer),
                "base_same": same and bool(before),
                "memory": memory_of(trainer),
                **({"oracle": oracles[model]} if dist.get_rank() == 0 else {}),
            }
        )
        trainer.close()
    return found


def check_start(bench: Bench) -> dict[str, Any]:
    """Adapters begin with the same A in every layout, B is 0, and recomputation changes no gradient."""
    wholes: list[dict[str, torch.Tensor]] = []
    for parallel in ({}, {"tensor": 2, "expert": 2}, {"pipeline": 2, "expert_tensor": 2}):
        trainer = build(bench, "qwen3_moe", parallel, path=None)
        assert trainer.adapters is not None
        parts: list[Any] = [None] * WORLD
        dist.all_gather_object(
            parts, (trainer.adapters.tensors.slices, dict(trainer.adapters.parameters))
        )
        whole = {
            name: torch.full(shape, torch.nan) for name, shape in adapter_shapes(trainer).items()
        }
        for slices, parameters in parts:
            for part in slices:
                place = tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))
                whole[part.name][place] = (
                    parameters[part.param]
                    .detach()
                    .as_strided(
                        part.shape,
                        part.strides,
                        part.offset + parameters[part.param].storage_offset(),
                    )
                )
        wholes.append(whole)
        trainer.close()
    norms = []
    for recompute in ("none", "full", "selective"):
        trainer = build(bench, "qwen3", {"pipeline": 2}, path=str(adapter_of(bench, "qwen3")), recompute=recompute,
                        recompute_modules=("mlp",))  # fmt: skip
        norms.append(train_supervised(trainer, random_batch(num_rows=8)).updates[0].grad_norm)
        trainer.close()
    return {
        "same": all(
            torch.equal(x, other[name]) for other in wholes[1:] for name, x in wholes[0].items()
        ),
        "b_is_zero": not any(x.any() for name, x in wholes[0].items() if ".lora_B." in name),
        "a_std": [
            float(x.std() * x.shape[1] ** 0.5)
            for name, x in wholes[0].items()
            if ".lora_A." in name
        ],
        "recomputed": norms,
    }


def check_resume(bench: Bench) -> dict[str, Any]:
    """Resumed in the same layout, training goes on bit for bit; and a checkpoint passes through other layouts whole."""
    folder, found = bench.folder / "lora-checkpoints", {}
    chain = [{"tensor": 2, "expert": 2}, {}, {"pipeline": 2, "tensor": 2, "expert_tensor": 2}]
    for number, parallel in enumerate(chain, 1):
        trainer = build(bench, "qwen3_moe", parallel, path=None)
        checkpoints = Checkpoints(
            folder, trainer, Cursor(), ObjectiveState(0.0), every=1, keep=9, last_step=9
        )  # type: ignore[arg-type]
        if number == 1:
            train_supervised(trainer, random_batch(num_rows=8))
        else:
            assert checkpoints.restore(str(folder / f"step_{number - 1}"))[0] == number - 1
        checkpoints.maybe_save(number, ObjectiveState(0.0))
        checkpoints.finish()
        if number == 1:
            train_supervised(trainer, random_batch(num_rows=8, seed=1))
            went_on = trained(trainer)
        trainer.close()
    trainer = build(bench, "qwen3_moe", chain[0], path=None)
    checkpoints = Checkpoints(
        folder, trainer, Cursor(), ObjectiveState(0.0), every=1, keep=9, last_step=9
    )  # type: ignore[arg-type]
    checkpoints.restore(str(folder / "step_1"))
    train_supervised(trainer, random_batch(num_rows=8, seed=1))
    resumed = trained(trainer)
    found["went_on"] = all(torch.equal(x, resumed[name]) for name, x in went_on.items())
    trainer.close()
    trainer = build(bench, "qwen3_moe", chain[1], path=None)
    name, weight = next(iter(trainer.parameters_by_name().items()))
    with torch.no_grad():
        weight.view(-1)[0] += 1
    checkpoints = Checkpoints(
        folder, trainer, Cursor(), ObjectiveState(0.0), every=1, keep=9, last_step=9
    )  # type: ignore[arg-type]
    try:
        checkpoints.restore(str(folder / "step_1"))
    except ValueError as error:
        found["other_base"] = f"{name}: {error}"
    trainer.close()
    from test_checkpoint import same

    if dist.get_rank() == 0:
        found["tensors"] = [same(folder / "step_1", folder / f"step_{number}") for number in (2, 3)]
        found["bytes"] = sum(file.stat().st_size for file in (folder / "step_1").glob("*.distcp"))
    return found


def trained(trainer: Trainer) -> dict[str, torch.Tensor]:
    assert trainer.adapters is not None
    return state_of(trainer) | {
        name: x.detach().clone() for name, x in trainer.adapters.parameters.items()
    }


CHECKS = {
    "layouts": lambda bench: measure(bench, FEW),
    "start": check_start,
    "resume": check_resume,
    "more_layouts": lambda bench: measure(bench, MORE),
}


def work(rank: int, results: str, folder: str, checks: list[str]) -> None:
    run_checks(join(rank, WORLD, folder), {name: CHECKS[name] for name in checks}, results)


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        mp.start_processes(work, (sys.argv[1], scratch, sys.argv[2:]), WORLD, start_method="fork")
