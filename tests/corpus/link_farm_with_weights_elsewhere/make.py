from __future__ import annotations

from pathlib import Path


def make(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    file.rename(folder / "weights")
    file.symlink_to(folder / "weights")
