"""Where the optimizer state waits between updates, from the sizes of trainers on one rank, and the arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.commands.random_model import materialize_model
from megarl.config.device_memory import OVERHEADS, activation_bytes
from megarl.config.load import load_config
from megarl.models.registry import read_model
from megarl.platform.device import pick_device
from megarl.platform.env import Env
from megarl.run import memory
from megarl.run.context import RankContext
from megarl.run.models import make_trainer

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.usefixtures("one_rank")
def test_the_state_stays_if_it_fits_beside_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["train.dtype=bf16", "train.updates_per_step=2", f"run.dir={tmp_path}"]
    settings += ["train.offload=[gradients, optimizer, weights]"]
    config = materialize_model(load_config(ROOT / "configs" / "tiny_dense.yaml", settings))
    rank = RankContext.of(config, Env(), pick_device(0))
    trainer = make_trainer(rank)
    number = sum(x.numel() for x in trainer.parameters_by_name().values())
    trainer.memory.offload_training_state()
    assert trainer.memory.bytes_off_device() == pytest.approx((4 + 12) * number, rel=0.01)
    trainer.memory.offload_all()
    memory.place_optimizer_state(rank, [trainer])
    assert trainer.memory.keeps_optimizer and "moves once a step" in capsys.readouterr().out
    # bf16 weights, fp32 gradients, fp32 weights and two moments; buffers are padded
    assert trainer.memory.bytes_off_device() == pytest.approx((2 + 4 + 12) * number, rel=0.01)
    tensors = trainer.memory.bytes_off_device() + activation_bytes(config, rank.shape)
    needed = 1.03 * tensors + OVERHEADS["workspaces"].high * 1e9
    for free, keeps in ((needed - 1e4, False), (needed + 1e4, True)):
        trainer.memory.keeps_optimizer = False
        monkeypatch.setattr(memory, "device_bytes", lambda _, free=free: (int(free), 80 * 10**9))
        memory.place_optimizer_state(rank, [trainer])
        assert trainer.memory.keeps_optimizer is keeps
        said = capsys.readouterr().out
        assert ("moves once a step" if keeps else "moves in every update") in said
        assert f"needs {needed / 1e9:.1f} GB" in said and f"of {free / 1e9:.1f} free" in said
    trainer.close()


@pytest.mark.parametrize(
    ("file", "model", "gigabytes"),
    [
        # of the headers, where a layer is counted once, without logits
        ("examples/math_8gpu/math_8gpu.yaml", "qwen3_8b", 3.5),
        ("configs/gpu/qwen3_30b_a3b_8gpu.yaml", "qwen3_30b_a3b", 2.4),
        ("configs/gpu/qwen3_235b_a22b_64gpu.yaml", "qwen3_235b_a22b", 4.0),
    ],
)
def test_activations_of_shipped_configs(file: str, model: str, gigabytes: float) -> None:
    config = load_config(ROOT / file, [])
    shape = read_model(ROOT / "configs" / "models" / model)
    full = activation_bytes(config, shape) / 1e9
    assert gigabytes < full < gigabytes + 3
    all_layers = config.model_copy(
        update={"train": config.train.model_copy(update={"recompute": "none"})}
    )
    assert activation_bytes(all_layers, shape) / 1e9 > 5 * full


def test_the_table_of_what_is_no_tensor_is_the_guides() -> None:
    guide = (ROOT / "docs" / "guides" / "large_models.md").read_text()
    for overhead in OVERHEADS.values():
        row = f"| {overhead.what} | {overhead.low:g} to {overhead.high:g} | {overhead.source} |"
        assert row in guide
