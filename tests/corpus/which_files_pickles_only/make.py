from __future__ import annotations

from pathlib import Path


def make(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    file.rename(file.with_name("pytorch_model.bin"))
