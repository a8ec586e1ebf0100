"""A random adapter of a saved model, and plain transformers with its product added to the weights as the oracle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call
from trainer_cases import oracle_logprobs

from megarl.config.schema import Train
from megarl.models.lora import PREFIX, adapter_table, peft_config
from megarl.models.registry import megatron_table, read_model
from megarl.models.shards import ShardSlice, shapes_of
from megarl.trainer.trainer import Trainer
from megarl.types import TrainBatch

RANK, ALPHA = 3, 5.0


def adapter_shapes(trainer: Trainer) -> dict[str, tuple[int, ...]]:
    assert trainer.adapters is not None
    return trainer.adapters.tensors.shapes


def random_adapter(
    model: Path,
    folder: Path,
    targets: Sequence[str] = ("all-linear",),
    *,
    rank: int = RANK,
    scale: float = 0.2,
) -> None:
    """Writes a PEFT folder."""
    shape, generator = read_model(model), torch.Generator().manual_seed(1)
    table = adapter_table(
        megatron_table(shape, spec="local", padded_vocab=shape.vocab), targets, rank
    )
    sizes = shapes_of(table, shape)
    folder.mkdir()
    tensors = {name: scale * torch.randn(size, generator=generator) for name, size in sizes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = peft_config(str(model), table, rank=rank, alpha=ALPHA, dropout=0.0)
    (folder / "adapter_config.json").write_text(json.dumps(config))


def tensors_by_name(
    slices: Sequence[ShardSlice], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Each slice as a tensor, named with its place."""
    found = {}
    for part in slices:
        x = parameters[part.param].detach()
        view = x.as_strided(part.shape, part.strides, x.storage_offset() + part.offset)
        found[f"{part.name}{part.start}{part.shape}"] = view.clone()
    return found


class LoraOracle:
    """Merges with autograd: a weight is W + alpha / rank * B A, and A and B are its parameters."""

    def __init__(self, model: torch.nn.Module, adapter: Path) -> None:
        self.model = model.eval()
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        loaded = load_file(adapter / "adapter_model.safetensors")
        config = json.loads((adapter / "adapter_config.json").read_text())
        self.scale = config["lora_alpha"] / config["r"]
        self.adapters = {name: torch.nn.Parameter(x) for name, x in loaded.items()}

    def weights(self) -> dict[str, Tensor]:
        """The model's parameters; transformers stacks experts, and their gate and up, that a checkpoint has apart."""
        changed: dict[str, Tensor] = {}
        for name in self.adapters:
            if name.endswith(".lora_A.weight"):
                a, b = self.adapters[name], self.adapters[name.replace("lora_A", "lora_B")]
                changed[name.removeprefix(PREFIX).replace(".lora_A", "")] = self.scale * b @ a
        parameters = dict(self.model.named_parameters())
        result: dict[str, Tensor] = {}
        for name, delta in changed.items():
            if name in parameters:
                result[name] = parameters[name] + delta
        for name, parameter in parameters.items():
            block, _, kind = name.rpartition(".")
            parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(
                kind, ()
            )
            if not block.endswith(".experts") or not parts:
                continue
            names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
            deltas = []
            for expert in range(parameter.shape[0]):
                found = [changed.get(f"{_checkpoint_block(block, old)}.{expert}.{old}.weight")
                         for part in parts for old in (part, names[part])]  # fmt: skip
                deltas.append([x for x in found if x is not None])
            if any(deltas):
                result[name] = parameter + torch.stack([torch.cat(part) for part in deltas])
        return result

    def logprobs(self, batch: TrainBatch) -> Tensor:
        weights = self.weights()

        def call(**inputs: Any) -> Any:
            return functional_call(self.model, weights, kwargs=inputs)

        return oracle_logprobs(call, batch)  # type: ignore[arg-type]

    def steps(self, batch: TrainBatch, train: Train, count: int) -> list[list[float]]:
        """[loss, gradient norm] of each step of supervised training with torch's AdamW."""
        optimizer = torch.optim.AdamW(self.adapters.values(), lr=train.lr, betas=train.betas, eps=train.eps,
                                      weight_decay=train.weight_decay)  # fmt: skip
        steps = []
        for _ in range(count):
            optimizer.zero_grad()
            loss = -self.logprobs(batch)[batch.mask].double().mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.adapters.values(), train.clip_grad)
            optimizer.step()
            steps.append([float(loss), float(norm)])
        return steps


def _checkpoint_block(block: str, projection: str) -> str:
    """Mixtral's experts are in block_sparse_moe in a checkpoint."""
    return block.replace(".mlp.", ".block_sparse_moe.") if projection.startswith("w") else block
