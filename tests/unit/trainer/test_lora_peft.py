"""The adapters of one rank: exported, they load in `peft` with equal log-probs, and its own are read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tiny_trainer import make_batch
from trainer_cases import load_model, oracle_logprobs, save_model

from megarl.checkpoint.hf_files import export_hf
from megarl.config.load import parse_config
from megarl.config.schema import Lora, Train
from megarl.config.validate import check_config
from megarl.layout import Layout, Parallel
from megarl.models.registry import read_model
from megarl.platform.env import Env
from megarl.stages.sft import train_supervised
from megarl.trainer.reference import FrozenBase, reference_of
from megarl.trainer.trainer import Trainer
from megarl.weights.sync.publish import WeightFormat
from megarl.weights.sync.transports import Transport

pytestmark = pytest.mark.usefixtures("one_rank")


def trainer_of(folder: Path, lora: Lora, **train: Any) -> Trainer:
    settings = Train.model_validate(
        {"dtype": "fp32", "lr": 1e-2, "max_tokens_per_microbatch": 64, **train}
    )
    layout, device = Layout.of(Parallel(), 1, 0), torch.device("cpu")
    return Trainer.build(
        read_model(folder), layout, train=settings, folder=folder, device=device, lora=lora
    )


def write_peft(trainer: Trainer, folder: Path, base: Path) -> None:
    adapters = trainer.adapters
    assert adapters is not None
    export_hf(
        folder,
        origin=None,
        weights=WeightFormat(adapters.tensors.shapes, torch.float32),
        sources=adapters.tensors.by_rank(),
        parameters=lambda: adapters.parameters,
        transport=Transport(),
        changes={"adapter_config.json": adapters.peft_config(str(base))},
    )


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3_moe", pytest.param("mixtral", marks=pytest.mark.long)]
)
def test_an_export_loads_in_peft_and_comes_back(tmp_path: Path, name: str) -> None:
    base, batch = save_model(name, tmp_path), make_batch(num_rows=8)
    trainer = trainer_of(base, Lora(rank=3, alpha=5.0))
    before = trainer.logprobs(batch)
    for _ in range(3):
        train_supervised(trainer, batch)
    after = trainer.logprobs(batch)
    assert (after - before).abs().max() > 0.05
    write_peft(trainer, tmp_path / "adapter", base)
    trainer.close()
    model = peft.PeftModel.from_pretrained(load_model(base), tmp_path / "adapter")
    with torch.no_grad():
        assert (oracle_logprobs(model, batch) - after).abs().max() < 2e-5
    again = trainer_of(base, Lora(rank=3, alpha=5.0, path=str(tmp_path / "adapter")))
    assert torch.equal(again.logprobs(batch), after)
    again.close()


def test_an_adapter_of_peft_is_read_by_its_names(tmp_path: Path) -> None:
    base, batch = save_model("qwen3", tmp_path), make_batch(num_rows=8)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(load_model(base), config)
    model.save_pretrained(tmp_path / "adapter")
    lora = Lora(rank=4, alpha=8.0, targets=("q_proj", "down_proj"), path=str(tmp_path / "adapter"))
    sections = {
        "stage": "sft",
        "lora": lora.model_dump(),
        "rollout": {"max_prompt_tokens": 8, "max_tokens": 8},
    }
    check_config(parse_config({"model": {"path": str(base)}, **sections}), Env())
    trainer = trainer_of(base, lora)
    with torch.no_grad():
        assert (oracle_logprobs(model, batch) - trainer.logprobs(batch)).abs().max() < 2e-5
    trainer.close()
    with pytest.raises(ValueError, match=r"v_proj.lora_A.weight, which"):
        trainer_of(base, lora.model_copy(update={"targets": ("q_proj", "v_proj", "down_proj")}))


def test_the_reference_is_the_base_without_a_copy(tmp_path: Path) -> None:
    base, batch = save_model("qwen3", tmp_path), make_batch(num_rows=8)
    trainer = trainer_of(base, Lora(rank=3))
    reference = reference_of(trainer)
    assert isinstance(reference, FrozenBase) and reference.is_policy
    before = trainer.logprobs(batch)
    train_supervised(trainer, batch)
    assert not reference_of(trainer).is_policy, "as in a run that was resumed"
    with reference.in_use():
        assert torch.equal(trainer.logprobs(batch), before)
    assert not torch.equal(trainer.logprobs(batch), before)
    with pytest.raises(RuntimeError), reference.in_use():
        raise RuntimeError
    assert not torch.equal(trainer.logprobs(batch), before)
    trainer.close()


def test_dropout_is_of_training_only_and_offloaded_weights_come_back(tmp_path: Path) -> None:
    base, batch = save_model("qwen3", tmp_path), make_batch(num_rows=8)
    trainer = trainer_of(
        base, Lora(rank=3, dropout=0.5), offload=("gradients", "optimizer", "weights")
    )
    train_supervised(trainer, batch)
    logprobs = trainer.logprobs(batch)
    weights = {name: x.clone() for name, x in trainer.parameters_by_name().items()}
    trainer.memory.offload_all()
    assert all(x.untyped_storage().nbytes() == 0 for x in trainer.parameters_by_name().values())
    trainer.memory.onload_all()
    assert all(torch.equal(x, weights[name]) for name, x in trainer.parameters_by_name().items())
    assert torch.equal(trainer.logprobs(batch), logprobs), "no dropout in a forward pass"
    norms = {train_supervised(trainer, batch).updates[0].loss for _ in range(2)}
    assert len(norms) == 2
    trainer.close()
