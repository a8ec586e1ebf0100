"""What leaves memory comes back bit for bit; freed gradients are really gone; recomputing changes no number."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "dist"))
import memory_peaks
from memory_peaks import SETTINGS
from trainer_cases import random_batch

from megarl.commands.random_model import create_model
from megarl.config.schema import Create, Train
from megarl.layout import Layout, Parallel
from megarl.models.registry import read_model
from megarl.stages.sft import train_supervised
from megarl.trainer.trainer import Trainer

SMALL = {
    "layers": 2,
    "hidden": 32,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 16,
    "vocab": 67,
    "tokenizer": "none",
}
MOE = {**SMALL, "family": "qwen3_moe", "experts": 4}
EVERYTHING = ["gradients", "optimizer", "weights"]


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(folder: Path, create: dict, **train) -> Trainer:
    values = {
        "dtype": "fp32",
        "lr": 1e-2,
        "max_tokens_per_microbatch": 64,
        "updates_per_step": 2,
        **train,
    }
    model, layout = create_model(Create(**create), folder), Layout.of(Parallel(), 1, 0)
    settings, device = Train.model_validate(values), torch.device("cpu")
    return Trainer.build(read_model(model), layout, train=settings, folder=model, device=device)


def learn(trainer: Trainer, steps: int = 2) -> list:
    """Losses and norms of each update, then the weights, as phases would let it."""
    found = []
    for step in range(steps):
        trainer.memory.onload_weights()
        batch = random_batch(num_rows=8, seed=step)
        trainer.forward(batch)
        report = train_supervised(trainer, batch)
        found += [(update.loss, update.grad_norm) for update in report.updates]
        trainer.memory.offload_training_state()
        trainer.memory.offload_all()
    trainer.memory.onload_all()
    return [found, [p.detach().clone() for p in trainer.parameters_by_name().values()]]


def same(one: list, other: list) -> bool:
    return one[0] == other[0] and all(
        torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True)
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_offload_changes_nothing(tmp_path: Path, dtype: str) -> None:
    plain = learn(build(tmp_path, SMALL, dtype=dtype))
    assert same(plain, learn(build(tmp_path, SMALL, dtype=dtype, offload=EVERYTHING)))


def test_what_is_away_has_no_memory(tmp_path: Path) -> None:
    trainer = build(tmp_path, {**SMALL, "vocab": 400_000}, offload=EVERYTHING)
    buffer = trainer.model[0].buffers[0]
    size, before = buffer.grad_data.nbytes, resident()
    assert size > 50e6 and buffer.grad_data.untyped_storage().nbytes() == 0, (
        "freed before the optimizer was built"
    )
    trainer.memory.onload_gradients()
    touched = resident()
    trainer.memory.offload_training_state()
    assert buffer.grad_data.untyped_storage().nbytes() == 0
    assert touched - resident() > 0.9 * size, (before, touched, resident())
    trainer.memory.offload_all()
    assert buffer.param_data.untyped_storage().nbytes() == 0
    trainer.memory.onload_weights()
    trainer.memory.onload_gradients()
    assert buffer.grad_data.abs().max() == 0 and buffer.param_data.abs().max() > 0


def resident() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # a rank on a CPU keeps what it frees
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.parametrize(
    ("create", "modules"), [(SMALL, ["core_attn", "mlp"]), (MOE, ["core_attn", "moe"])]
)
def test_recomputed_activations_change_nothing(
    tmp_path: Path, create: dict, modules: list[str]
) -> None:
    plain = learn(build(tmp_path, create))
    assert same(plain, learn(build(tmp_path, create, recompute="full")))
    assert same(
        plain, learn(build(tmp_path, create, recompute="selective", recompute_modules=modules))
    )
    with pytest.raises(ValueError, match=r"train\.recompute_modules=.*: attention is unavailable"):
        build(tmp_path, create, recompute="selective", recompute_modules=["attention"])


def test_recomputed_activations_are_not_kept(tmp_path: Path) -> None:
    """Tensors that wait for the backward pass, in bytes."""
    held = {
        how: saved_bytes(build(tmp_path, {**SMALL, "layers": 4}, recompute=how))
        for how in ("none", "selective", "full")
    }
    assert held["full"] < held["selective"] < held["none"], held


def test_peaks_of_phases_drop(tmp_path: Path) -> None:
    """Bytes on the device. In fp32 there are as many gradients as weights, and twice as many moments."""
    create = {**SMALL, "hidden": 64, "vocab": 1024}
    chosen = [
        "nothing",
        *(
            name
            for name in SETTINGS
            if name.startswith(("recompute", "offload")) and "," not in name
        ),
    ]
    found = {}
    for name in chosen:
        train = {"dtype": "fp32", **SETTINGS[name]}
        found[name], _ = memory_peaks.peaks(tmp_path / name, create, train, rows=4, longest=128)
    plain, one = found["nothing"], found["nothing"]["rollout"] / 4  # the weights
    trains = {name: peak["train"] for name, peak in found.items()}
    kept = {
        phase: {name: peak[phase] / one for name, peak in found.items()}
        for phase in ("rollout", "sync")
    }
    nearly = partial(pytest.approx, abs=0.1)

    assert (
        trains["recompute core_attn"] < 0.98 * plain["train"]
        and trains["recompute mlp"] < 0.9 * plain["train"]
    )
    assert trains["recompute full"] < 0.6 * plain["train"]
    for phase, weights in (("rollout", 0), ("sync", 1)):
        assert kept[phase]["offload gradients"] == nearly(3)
        assert kept[phase]["offload optimizer"] == nearly(2)
        assert kept[phase]["offload weights"] == nearly(3 + weights)
        assert kept[phase]["offload all"] == nearly(weights)
    for name in (
        "offload optimizer",
        "offload all",
    ):  # activations and moments are never there together
        assert (plain["train"] - trains[name]) / one == nearly(2)


def test_a_closed_trainer_is_gone(tmp_path: Path) -> None:
    """With its groups: several layouts built in one process, one after another, must not add up."""
    trainer = build(tmp_path, MOE)
    learn(trainer, steps=1)
    model, groups = weakref.ref(trainer.model[0]), len(dist.distributed_c10d._world.pg_map)
    trainer.close()
    assert model() is None
    assert len(dist.distributed_c10d._world.pg_map) == 1 < groups


def saved_bytes(trainer: Trainer) -> int:
    total = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        if torch._C._current_graph_task_id() == -1:  # not what is made again in the backward pass
            total += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        learn(trainer, steps=1)
    return total


def test_bf16_has_fp32_main_weights_and_fp32_gradients(tmp_path: Path) -> None:
    trainer = build(tmp_path, SMALL, dtype="bf16", lr=1e-5)
    assert {p.dtype for p in trainer.parameters_by_name().values()} == {torch.bfloat16}
    assert {buffer.grad_data.dtype for chunk in trainer.model for buffer in chunk.buffers} == {
        torch.float32
    }
    for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        assert {p.dtype for group in part.optimizer.param_groups for p in group["params"]} == {
            torch.float32
        }
    main = (
        trainer.optimizer.chained_optimizers[0]
        if hasattr(trainer.optimizer, "chained_optimizers")
        else trainer.optimizer
    )
    before = [p.detach().clone() for group in main.optimizer.param_groups for p in group["params"]]
    learn(trainer, steps=1)
    after = [p.detach() for group in main.optimizer.param_groups for p in group["params"]]
    moved = max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True))
    assert 0 < moved < 1e-4, "steps too small for bf16 are kept in the main weights"
