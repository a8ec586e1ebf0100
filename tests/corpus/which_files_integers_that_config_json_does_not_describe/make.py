from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def make(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].to(torch.int8)}, file)
