"""Adapters beside low precision: of a base that was published quantised, and of one that computes in emulated FP8."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_cases import random_adapter
from quantised_folders import make_quantised, read_all, stored
from safetensors.torch import save_file
from tiny_trainer import make_batch
from torch import Tensor
from trainer_cases import save_model

from megarl.algorithms.objective import loss_weights, supervised_loss
from megarl.checkpoint.hf_files import export_hf
from megarl.checkpoint.hf_folder import HfFolder
from megarl.config.precision import Fp8
from megarl.config.schema import Lora, Precision, Train
from megarl.data.packing import plan_microbatches
from megarl.layout import Layout, Parallel
from megarl.models.registry import fp32_tensors, read_model
from megarl.stages.sft import train_supervised
from megarl.trainer.lora import Merged
from megarl.trainer.trainer import Trainer
from megarl.weights.sync.publish import WeightFormat
from megarl.weights.sync.transports import Transport

pytestmark = pytest.mark.usefixtures("one_rank")
RANK, ALPHA = 3, 5.0  # of lora_cases


def build(
    folder: Path, lora: Lora | None, *, dtype: str = "fp32", fp8: Fp8 | None = None
) -> Trainer:
    settings = Train.model_validate({"dtype": dtype, "lr": 1e-2, "max_tokens_per_microbatch": 64})
    layout, device = Layout.of(Parallel(), 1, 0), torch.device("cpu")
    return Trainer.build(
        read_model(folder),
        layout,
        train=settings,
        folder=folder,
        device=device,
        lora=lora,
        precision=Precision(fp8=fp8),
    )


@pytest.mark.parametrize("kind", ["qwen3_moe-fp8", "gpt_oss-mxfp4", "deepseek_v3-int4"])
def test_a_quantised_base_is_adapted_as_the_weights_that_it_stands_for(
    tmp_path: Path, kind: str
) -> None:
    """Bit for bit as its dequantised folder; the merged export has the format that the base came in."""
    folder, _, parts = make_quantised(kind, tmp_path)
    plain, batch = tmp_path / "plain", make_batch(num_rows=4)
    shutil.copytree(folder, plain)
    values = json.loads((plain / "config.json").read_text())
    del values["quantization_config"]
    (plain / "config.json").write_text(json.dumps(values))
    whole = read_all(folder)
    replaced = {name + suffix for name, of_name in parts.items() for suffix in of_name}
    as_is = {name: x for name, x in stored(folder).items() if name not in replaced}
    save_file(as_is | whole, plain / "model.safetensors", metadata={"format": "pt"})
    targets = ("q_proj", "o_proj") if "gpt_oss" in kind else ("all-linear",)
    if "deepseek" in kind:
        targets = ("gate_proj", "down_proj", "o_proj")
    random_adapter(plain, tmp_path / "adapter", targets)
    lora = Lora(rank=RANK, alpha=ALPHA, targets=targets, path=str(tmp_path / "adapter"))
    found: list[tuple[float, float, Tensor]] = []
    sent: dict[str, Tensor] = {}
    storage = HfFolder(folder).export_storage()
    for base in (plain, folder):
        trainer = build(base, lora, dtype="bf16")
        update = train_supervised(trainer, batch).updates[0]
        found.append((update.loss, update.grad_norm, trainer.logprobs(batch)))
        if base is folder:
            assert trainer.adapters
            merged = Merged(trainer.parameters_by_name(), trainer.adapters.layers)
            export_hf(
                tmp_path / "hf",
                origin=folder,
                weights=WeightFormat(
                    trainer.tensors.shapes, torch.bfloat16, fp32_tensors(trainer.shape)
                ),
                sources=trainer.tensors.by_rank(),
                parameters=trainer.merged_parameters,
                transport=Transport(),
                storage=storage,
            )
            for part in trainer.tensors.slices:
                if part.name in whole and part.shape == whole[part.name].shape:
                    x = merged[part.param]
                    sent[part.name] = x.as_strided(
                        part.shape, part.strides, x.storage_offset() + part.offset
                    ).clone()
        trainer.close()
    assert found[0][:2] == found[1][:2] and torch.equal(found[0][2], found[1][2])
    again = read_all(tmp_path / "hf")
    assert {name: x.dtype for name, x in stored(tmp_path / "hf").items()} == {
        name: x.dtype for name, x in stored(folder).items()
    }
    for name, x in sent.items():
        exact = torch.stack(
            [storage.round(matrix) for matrix in x.view(-1, *x.shape[-2:])]
        ).view_as(x)
        assert torch.equal(again[name], exact), name
    changed = [name for name, x in whole.items() if not torch.equal(again[name], x)]
    assert bool(changed) == bool(sent) == ("gpt_oss" not in kind), (
        "its quantised weights are experts, not adapted"
    )


def adapter_gradients(folder: Path, lora: Lora, fp8: Fp8 | None = None) -> dict[str, Tensor]:
    trainer = build(folder, lora, fp8=fp8)
    batch = make_batch(num_rows=8, seed=3)
    plan = plan_microbatches(batch, trainer.layout, trainer.train)
    adapters: Any = trainer.adapters
    base = {name: x.clone() for name, x in trainer.parameters_by_name().items()}

    gradients = trainer.backward(batch, plan, supervised_loss, loss_weights(batch, plan))
    seen = {name: x.main_grad.clone() for name, x in adapters.parameters.items()}
    trainer.apply(gradients)
    assert all(torch.equal(x, base[name]) for name, x in trainer.parameters_by_name().items())
    trainer.close()
    return seen


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_in_fp8_the_base_is_rounded_and_adapters_learn(tmp_path: Path, recipe: Any) -> None:
    folder, batch, fp8 = (
        save_model("qwen3_moe", tmp_path),
        make_batch(num_rows=8),
        Fp8(recipe=recipe, emulate=True),
    )
    logprobs = []
    for lora in (None, Lora(rank=RANK, alpha=ALPHA)):
        trainer = build(folder, lora, fp8=fp8)
        logprobs.append(trainer.logprobs(batch))
        if lora is not None:
            losses = [train_supervised(trainer, batch).updates[0].loss for _ in range(3)]
            assert losses[2] < losses[0] - 0.1
            adapters: Any = trainer.adapters
            with adapters.off():
                logprobs.append(trainer.logprobs(batch))
        trainer.close()
    assert torch.equal(logprobs[0], logprobs[1]) and torch.equal(logprobs[0], logprobs[2]), (
        "B = 0, or off: the base"
    )
    random_adapter(folder, tmp_path / "adapter")
    lora = Lora(rank=RANK, alpha=ALPHA, path=str(tmp_path / "adapter"))
    exact = adapter_gradients(folder, lora)
    rounded = adapter_gradients(folder, lora, fp8=fp8)
    one, other = (torch.cat([x.flatten() for x in found.values()]) for found in (exact, rounded))
    cosine = float(torch.nn.functional.cosine_similarity(one, other, dim=0))
    assert 0.9 < cosine < 0.99999
