from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file


def make(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    weight_map = dict.fromkeys(tensors, "model-00001-of-00002.safetensors")
    weight_map["model.norm.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
