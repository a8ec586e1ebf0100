from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file


def make(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    shards = {"model-00001-of-00001.safetensors": {name: -x for name, x in tensors.items()}}
    weight_map = {}
    for name, part in shards.items():
        save_file(part, folder / "model" / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
