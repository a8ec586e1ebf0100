from __future__ import annotations

from pathlib import Path


def make(folder: Path) -> None:
    (folder / "x.py").write_text("")
    (folder / "model" / "tokenization_x.py").symlink_to("../x.py")
