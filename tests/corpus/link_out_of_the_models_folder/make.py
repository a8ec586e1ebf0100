from __future__ import annotations

from pathlib import Path


def make(folder: Path) -> None:
    file = folder / "model" / "tokenizer_config.json"
    file.rename(folder / "secret")
    file.symlink_to(folder / "secret")
