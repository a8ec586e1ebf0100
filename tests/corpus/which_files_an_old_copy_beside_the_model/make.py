from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def make(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    old = {name: torch.randn_like(tensor) for name, tensor in tensors.items()}
    save_file(old, folder / "model" / "model_old.safetensors")
