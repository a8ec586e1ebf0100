from __future__ import annotations

from pathlib import Path


def make(folder: Path) -> None:
    file = folder / "model" / "config.json"
    file.write_text(file.read_text().replace("{", '{"vocab_size": 300,', 1))
