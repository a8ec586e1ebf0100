from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file


def make(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    renamed = {f"layers.{number}.w": tensor for number, tensor in enumerate(tensors.values())}
    save_file(renamed, folder / "model" / "consolidated.safetensors")
