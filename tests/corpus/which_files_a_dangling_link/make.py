from __future__ import annotations

from pathlib import Path


def make(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    file.unlink()
    file.symlink_to("/mnt/not-mounted/model.safetensors")
