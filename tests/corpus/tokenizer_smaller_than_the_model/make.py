from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def make(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    name = "model.embed_tokens.weight"
    save_file(tensors | {name: torch.zeros(320, 64)}, file)
