from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file


def make(folder: Path) -> None:
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    sizes = {"lora_A": (8, 64), "lora_B": (128, 8)}
    tensors = {f"{prefix}.{part}.weight": torch.zeros(size) for part, size in sizes.items()}
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
