from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file


def make(folder: Path) -> None:
    tensors = {}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}"
        tensors[f"{prefix}.self_attn.q_proj.lora_A.weight"] = torch.zeros(8, 64)
        tensors[f"{prefix}.self_attn.q_proj.lora_B.weight"] = torch.zeros(128, 8)
    tensors[f"{prefix}.mlp.down_proj.lora_A.weight"] = torch.zeros(8, 128)
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
