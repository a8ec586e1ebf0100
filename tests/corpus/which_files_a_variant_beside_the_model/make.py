from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file


def make(folder: Path) -> None:
    tensors = load_file(folder / "model" / "model.safetensors")
    half = {name: tensor.half() for name, tensor in tensors.items()}
    save_file(half, folder / "model" / "model.fp16.safetensors")
