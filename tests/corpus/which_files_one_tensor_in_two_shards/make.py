from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file


def make(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    norm = {"model.norm.weight": tensors["model.norm.weight"] * 2}
    save_file(tensors, folder / "model" / "model-00001-of-00002.safetensors")
    save_file(norm, folder / "model" / "model-00002-of-00002.safetensors")
    weight_map = dict.fromkeys(tensors, "model-00001-of-00002.safetensors")
    weight_map["model.norm.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
