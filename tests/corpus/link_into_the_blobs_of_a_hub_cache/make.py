from __future__ import annotations

from pathlib import Path


def make(folder: Path) -> None:
    cache = folder / "models--org--name"
    snapshot = cache / "snapshots" / "0123abc"
    blobs = cache / "blobs"
    for part in (snapshot, blobs):
        part.mkdir(parents=True)
    for number, file in enumerate(sorted((folder / "model").iterdir())):
        file.rename(blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
