from __future__ import annotations

from pathlib import Path


def make(folder: Path) -> None:
    snapshot = folder / "models--org--name" / "snapshots" / "0123abc"
    snapshot.parent.mkdir(parents=True)
    (folder / "model").rename(snapshot)
    (folder / "models--org--name" / "secret").write_text("{}")
    (snapshot / "generation_config.json").unlink()
    (snapshot / "generation_config.json").symlink_to("../../secret")
