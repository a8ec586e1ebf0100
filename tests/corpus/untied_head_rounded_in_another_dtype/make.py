from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def make(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(tensors | {"lm_head.weight": head}, file, metadata={"format": "pt"})
