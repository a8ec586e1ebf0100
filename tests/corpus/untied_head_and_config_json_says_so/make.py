from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def make(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = torch.randn(262, 64, generator=torch.Generator().manual_seed(1))
    save_file(tensors, file, metadata={"format": "pt"})
