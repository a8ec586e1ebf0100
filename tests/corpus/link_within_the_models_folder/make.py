from __future__ import annotations

from pathlib import Path


def make(folder: Path) -> None:
    (folder / "model" / "special_tokens_map.json").symlink_to("extra.txt")
    (folder / "model" / "extra.txt").write_text("{}")
    (folder / "model").rename(folder / "v1")
    (folder / "model").symlink_to("v1")
