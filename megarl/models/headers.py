"""Names and shapes of a Hugging Face folder's tensors, from the headers of its safetensors files. No torch here."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

__all__ = ["header_shapes"]


@cache
def header_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Raises ValueError naming the file that is not there, or that is none."""
    files = sorted(folder.glob("*.safetensors"))
    if (index := folder / "model.safetensors.index.json").is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors; this model's tensors are known from their headers alone")
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with file.open("rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read as safetensors ({error}); copy the folder again") from None
        found |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return found
