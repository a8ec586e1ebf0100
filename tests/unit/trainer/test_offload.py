"""What leaves memory comes back bit for bit; freed gradients are really gone; recomputing changes no number."""

from __future__ import annotations

import ctypes
import math
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "dist"))
import memory_peaks
from memory_peaks import SETTINGS
from trainer_cases import random_batch

from benchmarks.memory_phases import DEVICE, Device
from megarl.commands.random_model import create_model
from megarl.config.schema import Create, Rollout, Train
from megarl.layout import Layout, Parallel
from megarl.models.registry import read_model
from megarl.parity.gate import ParityChecks, measure_logprobs
from megarl.processes.exit_codes import CurrentPhase
from megarl.rollout.vllm.engine import Engine
from megarl.run.phases import TimedPhases
from megarl.stages.sft import train_supervised
from megarl.trainer.trainer import Trainer
from megarl.weights.sync.transports import Transport

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


def learn(trainer: Trainer, steps: int = 2, *, keeps: bool = False) -> list:
    """Losses and norms of each update, then the weights, as phases would let it."""
    found = []
    trainer.memory.keeps_optimizer = keeps
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


@pytest.mark.parametrize("updates", [2, 4])
def test_where_the_optimizer_state_waits_changes_nothing(tmp_path: Path, updates: int) -> None:
    built = partial(build, tmp_path, MOE, dtype="bf16", updates_per_step=updates)
    plain = learn(built())
    for keeps in (False, True):
        assert same(plain, learn(built(offload=EVERYTHING), keeps=keeps))


@pytest.mark.parametrize("keeps", [False, True])
def test_the_optimizer_state_moves_once_a_step_or_in_every_update(
    tmp_path: Path, keeps: bool
) -> None:
    steps, updates = 2, 2
    with Device().with_host() as device:
        offload = ["gradients", "optimizer"]
        trainer = build(tmp_path, SMALL, dtype="bf16", updates_per_step=updates, offload=offload)
        learn(trainer, steps=1, keeps=keeps)
        moments_and_weights = 12 * sum(x.numel() for x in trainer.optimizer.get_parameters())
        trainer.memory.offload_all()
        gradients = sum(x.grad_data.numel() * 4 for x in trainer.model[0].buffers)
        assert trainer.memory.bytes_off_device() == moments_and_weights + gradients
        device.moved = dict.fromkeys(device.moved, 0)
        learn(trainer, steps, keeps=keeps)
    # back once more in the end; away before every update, or after every step
    count = steps if keeps else steps * updates
    assert device.moved == {
        "to host": count * moments_and_weights,
        "to device": (count + 1) * moments_and_weights,
    }


def test_the_engine_and_the_trainer_take_turns_in_a_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes on the device, of a share that fills it: the trainer's weights do not fit beside the KV cache."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    device = Device()
    peaks: dict[str, int] = {}
    telemetry: Any = SimpleNamespace(span=lambda name: nullcontext(), add=lambda metrics: None)
    with device.with_host():
        trainer = build(tmp_path, {**SMALL, "vocab": 4096}, offload=EVERYTHING)
        trainer.memory.offload_all()
        before = device.bytes()
        trainer.memory.onload_weights()
        weights = device.bytes() - before
        trainer.memory.offload_all()
        llm = Llm(device, weights=1_000_000, cache=3_000_000)
        receiver: Any = SimpleNamespace(state="sealed", request=None, abort=lambda: None)
        engine = Engine(llm, Rollout(sleep_level=2), (), receiver, eager=False)  # type: ignore[arg-type]
        engine.sleep()
        assert device.bytes() == before
        phases = TimedPhases(telemetry, DEVICE, [trainer], engine, CurrentPhase())
        checks = ParityChecks(
            Transport(), partial(measure_logprobs, trainer), [engine], [(3, 1), (4, 1, 5)], 4, max_diff=math.inf
        )  # fmt: skip
        nearly = partial(pytest.approx, abs=50_000)  # the probe's tokens and log-probs
        assert weights > 500_000
        with phases.sync():
            assert device.bytes() == nearly(before + weights + llm.weights)
            with device.peak("probe", peaks):
                checks.check()
            assert device.bytes() == nearly(before + weights + llm.weights)
        assert device.bytes() == nearly(before + llm.weights + llm.cache)
    share = before + llm.weights + llm.cache
    assert llm.most == nearly(share), "the engine computes, and nothing lies beside its share"
    assert peaks["probe"] == nearly(share), "the trainer computes without the KV cache"


class Llm:
    """vLLM's LLM with memory: weights and a cache, and `most`, the device's bytes while it computes."""

    model_config = SimpleNamespace(max_model_len=64)

    def __init__(self, device: Device, *, weights: int, cache: int) -> None:
        self.device, self.weights, self.cache = device, weights, cache
        self.most, self.is_paused = 0, False
        self.held = {"weights": torch.empty(weights, dtype=torch.uint8)}
        self.held["kv_cache"] = torch.empty(cache, dtype=torch.uint8)
        self.outputs: list[Any] = []
        self.llm_engine = SimpleNamespace(
            step=self._step, has_unfinished_requests=lambda: bool(self.outputs)
        )

    def sleep(self, level: int) -> None:
        self.is_paused = True
        if level:
            self.held.clear()

    def release_kv_cache_memory(self) -> None:
        assert self.is_paused and len(self.held) == 2, "as vLLM requires"
        del self.held["kv_cache"]

    def wake_up(self, tags: list[str]) -> None:
        (tag,) = tags
        size = self.weights if tag == "weights" else self.cache
        self.held[tag] = torch.empty(size, dtype=torch.uint8)
        self.is_paused = len(self.held) < 2

    def enqueue(self, inputs: list[Any], params: list[Any], **_options: Any) -> list[str]:
        for number, (prompt, each) in enumerate(zip(inputs, params, strict=True)):
            scores = SimpleNamespace(logprobs=[-1.0] * (len(prompt["prompt_token_ids"]) - 1))
            answer = SimpleNamespace(token_ids=list(range(each["max_tokens"])))
            self.outputs.append(
                SimpleNamespace(
                    request_id=str(number), finished=True, prompt_logprobs=scores, outputs=[answer]
                )
            )
        return [f"{output.request_id}-a" for output in self.outputs]

    def _step(self) -> list[Any]:
        assert not self.is_paused, "vLLM would wait for ever"
        self.most = max(self.most, self.device.bytes())
        done, self.outputs = self.outputs, []
        return done


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
